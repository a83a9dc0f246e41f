"""What trained models lose: texts, HumanEval, rows, parts for a host without network, leases."""

import gzip
import json
import os
import re
import subprocess
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from zlib import crc32

import psutil
import pytest
import torch

from benchmarks.common.json_lines import append_line, lines_of, zipped_lines_of
from benchmarks.real_models import answers, headline_jobs, lease_jobs, parts, texts
from benchmarks.real_models.__main__ import main
from benchmarks.real_models.as_served import against_reference
from benchmarks.real_models.compressed import Making, directory_name, facts
from benchmarks.real_models.human_eval import paired, passed
from benchmarks.real_models.lease import Job, Lease
from benchmarks.real_models.measure import Measuring
from benchmarks.real_models.overlap import Overlap
from benchmarks.real_models.page import write_result
from benchmarks.real_models.prompts import prompts
from benchmarks.real_models.rows import ROWS, chosen
from loadtest.ab.comparison_file import load_comparison
from tests.serving.quantized import write_quantized
from tests.support.dense_models import config, write, write_text
from tests.support.stored_models import logits_of
from tests.support.waiting import wait_until_gone
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import GacError
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest

PROBLEM = {
    "task_id": "T/0",
    "entry_point": "double",
    "prompt": 'import math\n\n\ndef double(x: int) -> int:\n    """Twice the number x that is '
    'given, which may be negative or zero, as an integer."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """A file as HumanEval's."""
    path = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(path, "wt") as file:
        print(json.dumps(PROBLEM), file=file)
    return path


def test_programs_run_apart_and_are_judged_by_their_tests() -> None:
    right = "Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is it."
    answers = {
        right: True,
        "    return x + x": True,  # the rest of the prompt, without a block
        "```python\ndef double(x):\n    return 3 * x\n```": False,
        "```python\ndef double(x:\n```": False,
        "```python\nimport socket\nsocket.socket()\ndef double(x):\n    return 6\n```": False,
        "```python\nopen('big', 'w').write('x' * (1 << 22))\ndef double(x): return 6\n```": False,
    }
    solved = passed([PROBLEM] * len(answers), list(answers))
    assert solved == list(answers.values())


def test_two_models_are_compared_problem_by_problem() -> None:
    dense = [True] * 80 + [False] * 20
    worse = [True] * 60 + [False] * 40
    comparison = paired(worse, dense)
    low, high = comparison["interval"]
    assert comparison["points"] == pytest.approx(-20)
    assert low < -20 < high < 0
    assert comparison["p"] < 1e-4
    assert paired(dense, dense) == {"points": 0, "interval": (0, 0), "p": 1}


def test_text_with_words_of_a_problem_is_found(problems: Path) -> None:
    overlap = Overlap(problems)
    assert overlap.found_in(f"x = 1\n{PROBLEM['prompt'].upper()}")
    assert not overlap.found_in("Twice the number x that is given, or half of it.")


def test_texts_are_split_by_package_without_problems(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "This is a long sentence about nothing in particular, with words that go on and on. "
    once = (9 * sentence).strip()
    code = f'def f{{}}():\n    """{sentence * 9}"""\n    return 1\n' + "# more\n" * 60

    site, names = tmp_path / "site", [f"p{number}" for number in range(12)]
    for name in names:
        sources = {
            "a.py": code.format(name),
            "test_a.py": "# a test\n" * 99,
            "b.py": PROBLEM["prompt"] + "# padding\n" * 99,
        }
        about = site / f"{name}-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Name: {name}\nVersion: 1\n\n{sentence * 9}")
        (about / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in sources))
        (site / name).mkdir()
        for file, source in sources.items():
            (site / name / file).write_text(source)
    monkeypatch.setattr(texts, "distributions", lambda: distributions(path=[str(site)]))
    texts.write_texts(tmp_path / "texts", problems)
    written = json.loads((tmp_path / "texts" / "texts.json").read_text())["texts"]
    by_part = {}
    for split in texts.SPLITS:
        records = zipped_lines_of(tmp_path / "texts" / f"code-{split}.jsonl.gz")
        by_part[split] = {record["package"] for record in records} - {texts.LIBRARY}
        said = written[f"code-{split}.jsonl.gz"]
        assert said["overlap_dropped"] == len(by_part[split])
        assert by_part[split] | {texts.LIBRARY} >= set(said["packages"]) >= by_part[split]
        assert not any(
            "a test" in record["text"] for record in records if record["package"] in names
        )
        prose = zipped_lines_of(tmp_path / "texts" / f"prose-{split}.jsonl.gz")
        assert {each for record in prose for each in record["text"].split("\n\n")} == {once}
        assert {record["package"] for record in prose} == by_part[split]
    assert sorted(set.union(*by_part.values())) == sorted(names)
    assert sum(map(len, by_part.values())) == len(names)


def test_prompts_are_of_documented_functions_and_paragraphs() -> None:
    code = "".join(
        f'def f{n}(a, b=1):\n    """Return the sum of a and b, number {n} of many."""\n'
        for n in range(6)
    )
    cut = code + "def broken(:\n    x = ["
    paragraph = "A paragraph of prose that is long enough to be asked about. " * 5
    written = prompts([{"text": cut}, {"text": code}], [{"text": f"short\n\n{paragraph}"}], 99)
    assert len(written) == 7  # each function once
    assert sum("f3" in prompt for prompt in written) == 1
    assert sum("long enough" in prompt for prompt in written) == 1


def test_patterns_choose_rows() -> None:
    assert chosen(["KV .5", "dense"]) == ["KV .5", "dense"]
    assert set(chosen(["*"])) == set(ROWS)
    assert len({directory_name(name) for name in ROWS}) == len(ROWS)
    with pytest.raises(GacError, match=r"^--rows KV 9"):
        chosen(["KV 9"])


def test_a_row_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    write(tmp_path / "model", config())
    making = Making(tmp_path / "model", tmp_path / "none", tmp_path, [], 0, "cpu", seconds=300)
    with pytest.raises(GacError, match="none"):
        making.make("KV .5")


def test_rows_of_int4_weights_are_made_of_the_packed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, packed = tmp_path / "model", tmp_path / "w4a16"
    write(dense, config(hidden_size=64, head_dim=32), torch.bfloat16)
    making = Making(dense, tmp_path / "none", tmp_path, [], 0, "cpu", seconds=300)
    with pytest.raises(GacError, match=f"^{packed}: missing"):
        making.make("W4A16")
    write_quantized(dense, packed, tmp_path / "rounded", "W4A16", group_size=32)
    write_text(tmp_path / "text", 8192)
    request = CalibrateRequest(methods=("heads",), max_tokens=1024)
    stats = packed.with_suffix(".safetensors")
    calibrate(packed, [tmp_path / "text"], stats, request, progress=False)
    assert making.make("W4A16") == packed
    assert facts(dense, packed) == {"parameters": 1, "kv": 1}
    half = making.make("W4A16, KV .5")
    about = facts(dense, half)
    assert about["kv"] <= 0.5
    assert about["expected_loss"] > 0
    assert open_checkpoint(half).raw_config["quantization_config"]["quant_method"]
    ran: list[str] = []
    monkeypatch.setattr(Making, "_run", lambda making, out, *arguments: ran.extend(arguments))
    making.make("W4A16, KV .5, healed")
    assert ran[:4] == ["heal", f"{half}", "--teacher", f"{packed}"]


def test_answers_go_to_the_split_of_their_prompt_without_problems(
    problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generating(model: Path, given: Path, out: Path) -> "subprocess.Popen[str]":
        asked = [json.loads(line)["text"] for line in given.read_text().splitlines()]
        for number, prompt in enumerate(asked):
            name = "double" if number == 1 else f"g{crc32(prompt.encode())}"
            answer = f'```python\ndef {name}(x: int) -> str:\n    """Says what it is."""\n```'
            if number == 0:
                answer = PROBLEM["prompt"]
            said = {"user": prompt, "assistant": answer}
            row = {"messages": [{"role": role, "content": said[role]} for role in said]}
            append_line(out, row)
        said = json.dumps({"rows": len(asked)})
        return subprocess.Popen(["echo", said], stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(answers, "_generating", generating)
    for split in texts.SPLITS:
        about = f"Of {split[:4]}words. {'As it is. ' * 9}"
        code = "".join(f'def {split[:4]}{i}():\n    """{about}"""\n' for i in range(20))
        texts.write_records(tmp_path / f"code-{split}.jsonl.gz", [{"text": code}])
        texts.write_records(tmp_path / f"prose-{split}.jsonl.gz", [])
    answers.write_exercises(tmp_path, tmp_path, problems, 40)
    exercises = zipped_lines_of(tmp_path / "exercises.jsonl.gz")
    assert len({each["prompt"] for each in exercises}) == len(exercises) > 20
    assert not [each for each in exercises if "double" in each["prompt"]]  # as HumanEval's
    answers.write_answers(tmp_path, tmp_path, problems, 20)
    about = json.loads((tmp_path / "answers.json").read_text())
    assert [about[f"answers-{split}"] for split in texts.SPLITS] == [4, 13, 2]
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == []
    for split in texts.SPLITS:
        for row in zipped_lines_of(tmp_path / f"answers-{split}.jsonl.gz"):
            assert split[:4] in row["messages"][0]["content"]
        written = zipped_lines_of(tmp_path / f"exercises-{split}.jsonl.gz")
        prompts = [each["prompt"] for each in exercises if each["split"] == split]
        assert [row["messages"][0]["content"] for row in written] == prompts
    (task,) = zipped_lines_of(tmp_path / "tasks-held-out.jsonl.gz")
    assert PROBLEM["prompt"] in task["messages"][0]["content"]
    answers.write_exercises(tmp_path, tmp_path, problems, 40, ["healing"], engines=3)
    more = zipped_lines_of(tmp_path / "exercises.jsonl.gz")
    assert more[: len(exercises)] == exercises
    assert {each["split"] for each in more[len(exercises) :]} == {"healing"}
    (tmp_path / "exercises-healing.jsonl.gz").unlink()
    answers.write_answers(tmp_path, tmp_path, problems, 0, engines=2)  # what is there stays
    assert len(zipped_lines_of(tmp_path / "answers-healing.jsonl.gz")) == 13
    written = zipped_lines_of(tmp_path / "exercises-healing.jsonl.gz")
    of_split = [each for each in more if each["split"] == "healing"]
    assert len(written) == len(of_split) - 2  # each engine's first answer is as HumanEval's
    said = (tmp_path / "answers.json").read_bytes()
    answers.write_answers(tmp_path, tmp_path, problems, 0)  # nothing is missing
    assert (tmp_path / "answers.json").read_bytes() == said


def test_an_engine_is_compared_with_the_reference_token_by_token(tmp_path: Path) -> None:
    model, device = tmp_path / "model", "cpu"
    write(model, config())
    texts.write_records(tmp_path / "answers-held-out.jsonl.gz", [{"text": "some words " * 300}])
    making = Making(model, tmp_path, tmp_path, [], 0, device, seconds=1)
    windows = Measuring(making, tmp_path, tmp_path, tmp_path, windows=2).checked_windows(model)
    assert [window.dim() for window in windows] == [1, 1]
    engine = []
    for window in windows:
        log_probs = logits_of(model, window[None])[0, :-1].log_softmax(-1)
        scores = log_probs.gather(1, window[1:, None])[:, 0] - 0.5
        engine.append((scores.tolist(), log_probs.argmax(-1).tolist()))
    compared = against_reference(engine, model, windows, device)
    assert compared["loss"] - compared["reference_loss"] == pytest.approx(0.5, abs=1e-4)
    assert compared["difference"] == pytest.approx(0.5, abs=1e-4)
    assert compared["agreement"] == 1


def test_parts_make_the_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    content = os.urandom(1 << 20)
    file.write_bytes(content)
    monkeypatch.setattr(parts, "unneeded_bytes", lambda file: (1000, 500_000))
    monkeypatch.setattr(parts, "PART_BYTES", 200_000)
    assert main(["pack", f"{file}", f"{tmp_path / 'parts'}"]) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "parts").glob("*/part")]
    assert max(sizes) <= 200_000
    assert sum(sizes) < 600_000  # zeros take no room
    parts.join(tmp_path / "parts", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content[:1000] + bytes(499_000) + content[500_000:]
    last = tmp_path / "parts" / str(len(sizes) - 1) / "part"
    last.write_bytes(last.read_bytes()[:-9] + b"x" + last.read_bytes()[-8:])
    assert main(["join", f"{tmp_path / 'parts'}", f"{tmp_path / 'bad'}"]) == 1
    last.unlink()
    with pytest.raises(GacError, match=f"{last.parent.name}/part: missing"):
        parts.join(tmp_path / "parts", tmp_path / "bad")


def test_a_lease_runs_what_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    jobs = [
        Job("first", "sleep 0.5; echo made > made", 1, 30),
        Job("second", "cat made", 1, 30, ["first"]),
        Job("fails", "exit 3", 1, 30),
        Job("needs", "touch never", 1, 30, ["fails"]),
        Job("after", "cat made", 1, 30, after=["fails", "first"]),
        # A process group of its own, as an engine has.
        Job("hangs", f"setsid -w true; bash -mc 'sleep 60 & echo $! > {child}; wait'", 1, 2),
        Job("long", "touch never", 99, 99),
    ]
    monkeypatch.chdir(tmp_path)
    Lease(jobs, tmp_path / "out", gpus=1, each=2, seconds=40).run()
    said = {line["job"]: line["status"] for line in lines_of(tmp_path / "out" / "jobs.jsonl")}
    assert said == {
        "first": 0,
        "second": 0,
        "fails": 3,
        "needs": "needs {'fails'}",
        "after": 0,
        "hangs": "too long",
        "long": "no time",
    }
    assert (tmp_path / "out" / "logs" / "second.log").read_text() == "made\n"
    assert not (tmp_path / "never").exists()
    with suppress(psutil.NoSuchProcess):
        wait_until_gone([psutil.Process(int(child.read_text()))])


def test_a_gpu_becomes_empty_for_the_job_that_is_to_have_it_alone(tmp_path: Path) -> None:
    """Nothing later begins while it waits for what it needs."""
    jobs = [
        Job("first", "sleep 0.5", 1, 30),
        Job("alone", "true", 1, 30, ["first"], alone=True),
        Job("later", "true", 1, 30),
    ]
    Lease(jobs, tmp_path, gpus=1, each=2, seconds=40).run()
    begun = [
        line["job"] for line in lines_of(tmp_path / "jobs.jsonl") if line["status"] == "begins"
    ]
    assert begun == ["first", "alone", "later"]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_lease_has_all_that_its_jobs_need(
    rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease_jobs, "_HEAL", ["60:2e-5"] * rows)
    monkeypatch.setattr(lease_jobs, "_INT4_COMES", True)
    monkeypatch.setattr(lease_jobs, "_FIRST", ["two_gpus", "free"])
    monkeypatch.setattr(lease_jobs, "_OTHER_TEXTS", ["prose", "answers,code:65536"])
    monkeypatch.setenv("TESTS", "our_layers")
    lease_jobs.main()
    jobs = {job["name"]: Job(**job) for job in json.loads(capsys.readouterr().out)}
    assert {need for job in jobs.values() for need in job.needs} <= set(jobs)
    assert jobs["make-kv--5--healed"].alone
    assert "--heal-seconds 60 --heal-rate 2e-5" in jobs["make-kv--5--healed"].command
    assert jobs["make-w4a16"].after == jobs["free"].after == ["two_gpus"]
    assert jobs["free"].alone
    assert any(name.startswith("test_our_layers-") for name in jobs)
    assert not jobs["two_gpus"].gpu
    assert jobs["measure-answers-code-65536"].needs == ["calibrate-answers-code-65536"]
    assert "make-w4a16--kv--5" in jobs["make-w4a16--kv--5--healed"].needs
    assert '"${PRECISIONS/#fp8/fp8 cache}"' in jobs["served-w4a16--kv--5--healed"].command
    assert '"KV .5=$WORK/kv--5" "dense"' in jobs["speed"].command


@pytest.mark.parametrize("comparison", ["h200-fp8", "coder", "mine.yaml"])
def test_a_lease_compares_servers_when_their_models_are_there(
    comparison: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPARISON", comparison)
    headline_jobs.main()
    jobs = [Job(**job) for job in json.loads(capsys.readouterr().out)]
    *before, compare = jobs
    assert bool(compare.needs) == bool(before)
    assert {need for job in jobs for need in job.needs} <= {job.name for job in before}
    assert "--side-by-side" in compare.command
    assert f"{comparison.removesuffix('.yaml')}.yaml $RESULTS" in compare.command


def test_a_lease_starts_each_server_alone_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("L", str(tmp_path))
    monkeypatch.setenv("RUNS", "1:azure-conversation,azure-code-poisson 1:agents,mooncake-64k")
    headline_jobs.main()
    jobs = [Job(**job) for job in json.loads(capsys.readouterr().out)]
    assert [(job.alone, job.gpu, job.needs) for job in jobs[1:]] == [(True, True, ["models"])] * 6
    written = [load_comparison(tmp_path / f"{job.name}.yaml") for job in jobs[1:]]
    assert len({comparison.port for comparison in written}) == 6
    labels = [comparison.baseline for comparison in written]
    assert labels[0] != labels[3]
    assert set(labels[:3]) == set(labels[3:])
    assert len(set(labels)) == 3
    assert not any(traffic.search for comparison in written for traffic in comparison.traffic)
    # What is asked of each is in its file.
    for job, comparison in zip(jobs[1:], written, strict=True):
        asked = re.findall(r"--traffic (\S+)", job.command)
        assert set(asked) < {traffic.name for traffic in comparison.traffic}


def test_a_trained_models_dense_servers_start_before_it_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("L", str(tmp_path))
    monkeypatch.setenv("COMPARISON", "coder")
    monkeypatch.setenv("RUNS", "1 2")
    headline_jobs.main()
    jobs = [Job(**job) for job in json.loads(capsys.readouterr().out)]
    made = {job.name for job in jobs if job.name.startswith("make-")}
    assert sum(made <= set(job.needs) for job in jobs[-6:]) == 2
    assert not made <= set(jobs[-6].needs)


def test_the_trained_models_comparison_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "build" / "coder" / "prompts.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    monkeypatch.chdir(tmp_path)
    comparison = load_comparison(Path(headline_jobs.__file__).with_name("coder.yaml"))
    assert len(comparison.servers) == 3


def test_the_page_has_a_line_for_each_row(tmp_path: Path) -> None:
    about = dict.fromkeys(("model", "commit", "machine", "vllm", "torch", "triton", "date"), "x")
    text = {"ratio": 1.1, "interval": [1.0, 1.2], "divergence": 0.1, "agreement": 0.9}
    rows = [
        {
            **{"row": "dense", "measured": "bf16", "passed": "1111", "pass@1": 1.0},
            **{"samples": 2, "passed_samples": [2, 2, 2, 0], "mean@1": 0.75},
        },
        {"row": "KV .5", "measured": "model", "kv": 0.5, "expected_loss": 0.03, "parameters": 1.0},
        {"row": "KV .5", "measured": "code", "error": "out of memory"},
        {"row": "KV .5", "measured": "code", **text},
        {"row": "KV .5", "measured": "prose", "error": "out of memory"},
        {
            **{"row": "KV .5", "measured": "bf16", "passed": "1010", "pass@1": 0.5},
            **{"samples": 4, "passed_samples": [4, 2, 0, 0], "mean@1": 0.375},
            "as_served": {"loss": 1.5, "reference_loss": 1.25},
        },
    ]
    for row in rows:
        append_line(tmp_path / "rows.jsonl", row | about)
    write_result([tmp_path], tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    dense, half = result["rows"]
    assert (dense["row"], dense["bf16_points"]) == ("dense", 0)
    assert (half["kv"], half["code_agreement"], half["bf16_points"]) == (0.5, 0.9, -50)
    assert (half["bf16_mean"], half["bf16_mean_points"]) == (0.375, -37.5)
    assert half["bf16_served"] == 0.25
    assert result["failed"] == {"KV .5: prose": "out of memory"}
    assert set(half) <= set(result["columns"])

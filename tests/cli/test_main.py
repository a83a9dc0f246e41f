"""The command prints results on stdout, all else on stderr, and one line for each mistake."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import RUN, command, error, result, usage, without_bars
from tests.support.model_files import config, gac_config, write_model
from vllm_gac import __version__
from vllm_gac.cli import main

VERBS = (
    *("align", "calibrate", "compress", "evaluate", "export", "heal", "import", "inspect"),
    *("plan", "profile", "repair", "solve", "verify"),
)  # fmt: skip
_HEAL = ("heal", "m", "--teacher", "t", "--text", "x", "--out", "o")


# ---- the command as such ---------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, expected in (("--version", f"vllm-gac {__version__}\n"), ("--help", "usage: ")):
        with pytest.raises(SystemExit) as exited:
            main([flag])
        assert exited.value.code == 0
        assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_and_has_json(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main([verb, "--help"])
    assert exited.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "VERB"),
        (["profiles"], "'profiles'"),
        (["align"], "DIM"),
        (["align", "0"], "DIM: 0"),
        (["align", "1.5"], "'1.5'"),
        (["align", "8", "--strategy", "best"], "--strategy: invalid choice: 'best'"),
        (["align", "8", "--gpu", "h200"], "--gpu"),
        (["align", "8", "--heads", "2"], "--heads"),
        (["align", "8", "--tp", "2"], "--tensor-parallel-size"),
        (["inspect", ""], "''"),
        (["inspect", "hf://o/m"], "hf://o/m"),
        (["compress", "m", "--out", "s3://b/m"], "--out: s3://b/m"),
        (["evaluate", "m", "--text", "https://h/a.txt"], "--text: https://h/a.txt"),
        (["plan", "m", "--gpu", "h200"], "--param-ratio, --kv-ratio"),
        (["plan", "m", "--max-loss", "1"], "--max-loss: 1"),
        (["plan", "m", "--param-ratio", "0"], "--param-ratio: 0"),
        (["plan", "m", "--kv-ratio", "nan"], "--kv-ratio: nan"),
        (["plan", "m", "--method", "heads,magic"], "--method: 'magic'"),
        (["compress", "m", "--param-ratio", "0.8"], "--out"),
        (["compress", "m", "--out", "o"], "--param-ratio, --kv-ratio"),
        (["compress", "m", "--out", "o", "--plan", "p", "--kv-ratio", "1"], "--kv-ratio"),
        (["compress", "m", "--out", "o", "--plan", "p", "--method", "prune"], "--method"),
        (["compress", "m", "--out", "o", "--stats", "s", "--calibration", "c"], "--calibration"),
        ([*_HEAL, "--temperature", "1000"], "--temperature 1000.0"),
        ([*_HEAL, "--hidden-weight", "0"], "--hidden-weight: 0"),
        (["evaluate", "d"], "--text"),
        (["repair", "d", "--out", "o", "--overwrite"], "--overwrite"),
        (["evaluate", "d", "--text", "t", "--device", "tpu"], "--device: 'tpu'"),
        (["evaluate", "d", "--text", "t", "--max-tokens", "-1"], "--max-tokens: -1"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_what_is_wrong(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in usage(capsys, *args)


def test_an_unknown_option_is_answered_by_its_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "m", "--al\x1b[2J"])
    said = capsys.readouterr().err
    assert said.startswith("vllm-gac inspect: error: ")
    assert r"--al\x1b[2J" in said


def test_only_verbs_that_compute_import_torch(tmp_path: Path) -> None:
    write_model(tmp_path / "model", gac_config())
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    code = (
        "import sys; from vllm_gac.cli import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as e: status = e.code\n"
        "sys.exit(status or ('torch' in sys.modules or 'vllm' in sys.modules) * 99)"
    )
    for args in (
        ["--help"],
        ["align", "107", "--strategy", "measured"],
        ["solve", tmp_path / "problem.json"],
        ["inspect", tmp_path / "model"],
        ["verify", tmp_path / "model"],
    ):
        assert command(*args, code=code).returncode == 0, args


def test_a_verb_that_needs_torch_says_how_to_get_it(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None\n{RUN}"
    done = command("evaluate", tmp_path, "--text", tmp_path / "text", code=code)
    assert done.returncode == 1
    (said,) = done.stderr.splitlines()
    assert "'evaluate' needs torch" in said


def test_a_gpu_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--device cuda:99: " in error(
        capsys, "evaluate", tmp_path, "--text", "t", "--device", "cuda:99"
    )


def test_an_interrupt_is_one_line_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(directory: Path, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_gac.steps.inspect.inspect", interrupted)
    assert main(["inspect", "model"]) == 130
    assert capsys.readouterr() == ("", "vllm-gac: interrupted\n")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    reader, writer = os.pipe()
    os.close(reader)
    done = command("inspect", tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    with Path("/dev/full").open("w") as full:
        done = command("inspect", tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (1, "vllm-gac: error: No space left on device\n")


def test_names_cannot_break_the_line_or_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = tmp_path / "a\nb\x1b[2Jc"
    assert r"a\nb\x1b[2Jc: " in error(capsys, "inspect", evil)
    write_model(evil, config(), lambda t: t.update({"x\r\u202e": ("BF16", (1,))}))
    assert main(["verify", str(evil)]) == 1
    (fault,) = capsys.readouterr().out.splitlines()
    assert r"x\r\u202e: " in fault


# ---- align -----------------------------------------------------------------------------------

IN_BLOCKS = ("--quantization", "fp8_per_block")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["107", "114", "1237"], {"107": 112, "114": 120, "1237": 1240}),
        (["107", "114", "--strategy", "optimal"], {"107": 112, "114": 128}),
        (["107", "129", "--strategy", "predefined"], {"107": 112, "129": 160}),
        (["1237", "--strategy", "measured", "--role", "rank", "--gpu", "h200"], {"1237": 1248}),
        (["12185", "--role", "width", "-tp", "8"], {"12185": 12224}),
        (["107", "--strategy", "none"], {"107": 107}),
        (["12000", "--role", "width", *IN_BLOCKS], {"12000": 12032}),
        (["500", "--role", "rank", *IN_BLOCKS], {"500": 512}),
        (["100", "--heads", "8", *IN_BLOCKS], {"100": 112}),  # 8 heads are 896 = 7 blocks of 128
        (["100", *IN_BLOCKS], {"100": 128}),
    ],
)
def test_align(
    args: list[str], expected: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert result(capsys, "align", *args) == expected
    assert main(["align", *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{dim} -> {to}" for dim, to in expected.items()]


# ---- solve -----------------------------------------------------------------------------------

CANDIDATES = [
    {"dim": 96, "cost": 96, "value": 4.5},
    {"dim": 112, "cost": 112, "value": 5.0},
    {"dim": 128, "cost": 128, "value": 5.25},
]
PROBLEM = {
    "budget": 300,
    "items": [{"name": name, "candidates": CANDIDATES} for name in ("a", "b")],
}


def problem_file(directory: Path, **changes: Any) -> Path:
    path = directory / "problem.json"
    path.write_text(json.dumps(PROBLEM | changes))
    return path


def test_solve_one_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = {"choice": {"a": 128, "b": 128}, "cost": 256, "value": 10.5}
    assert result(capsys, "solve", problem_file(tmp_path)) == expected
    assert main(["solve", str(problem_file(tmp_path, budget=239))]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["item  dim", "a     112", "b     112", "", "cost: 224 of 239", "value: 10"]


def test_solve_two_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [
        {"dim": c["dim"], "value": c["value"], "costs": {"params": c["cost"] * 2, "kv": c["cost"]}}
        for c in CANDIDATES
    ]
    raw = {
        "budgets": {"params": 999, "kv": 208},
        "items": [{"name": "a", "candidates": candidates}, {"name": "b", "candidates": candidates}],
    }
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(raw))
    found = result(capsys, "solve", path)
    assert found["cost"] == {"params": 416, "kv": 208}
    assert found["choice"] == {"a": 96, "b": 112}


def test_solve_an_infeasible_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "192" in error(capsys, "solve", problem_file(tmp_path, budget=191), "--json")


def test_solve_a_malformed_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = problem_file(tmp_path, budget="300")
    assert error(capsys, "solve", path).startswith(f"{path}: budget: ")
    assert "none.json: " in error(capsys, "solve", tmp_path / "none.json")


def test_solve_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass over the items has a bar, which appears if the pass takes long."""
    shown: list[tuple[int, bool]] = []

    def bar(stages: list[Any], *_: str, disable: bool, **__: Any) -> list[Any]:
        shown.append((len(stages), disable))
        return stages

    monkeypatch.setattr("vllm_gac.planning.knapsack.search.tqdm", bar)
    assert main(["solve", str(problem_file(tmp_path))]) == 0
    assert shown == [(2, False)]


def test_solve_warns_of_what_it_could_not_prove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # If a pass keeps only two partial choices, it cannot prove that a choice is optimal.
    monkeypatch.setattr("vllm_gac.planning.knapsack.search._BEAMS", (2,))
    items = [
        {
            "name": str(i),
            "candidates": [
                {"dim": d, "cost": d * (i + 1) * 7 % 23, "value": d * (i + 5) % 17}
                for d in range(9)
            ],
        }
        for i in range(9)
    ]
    assert main(["solve", str(problem_file(tmp_path, budget=50, items=items)), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cost"] <= 50
    assert err.startswith("vllm-gac: warning: not proven optimal")


# ---- inspect and verify ----------------------------------------------------------------------


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, gac_config())
    found = result(capsys, "inspect", tmp_path)
    assert list(found) == [
        "format",
        "layers",
        "parameters",
        "kv_bytes_per_token",
        "dims",
        "aligned_dims",
        "aligned_fraction",
        "expected_loss",
        "measured",
    ]
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "format      gac (compressed by vllm-gac)"
    assert lines[-3:] == [
        "layers  keys           values  MLP width  ranks",
        "0       rotary 2 x 12  1 x 24  40         down_proj 8",
        "1       latent 2 x 8   2 x 8   32         -",
    ]


def test_inspect_joins_equal_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(write_model(tmp_path, config(num_hidden_layers=12)))]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0-11    rotary 2 x 16  2 x 16")


def test_verify_a_sound_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, config())
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("ok: 21 tensors, 25,760 parameters\n", "")
    assert result(capsys, "verify", tmp_path) == {
        "ok": True,
        "faults": [],
        "tensors": 21,
        "parameters": 25760,
    }


def test_verify_names_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(
        tmp_path,
        config(),
        lambda tensors: tensors.pop("model.norm.weight"),
        fill={"lm_head.weight": b"\xff\x7f"},
    )
    assert main(["verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    missing, nan = out.splitlines()
    assert missing.startswith(f"{tmp_path}: model.norm.weight: ")
    assert nan.startswith(f"{tmp_path / 'model.safetensors'}: lm_head.weight: ")
    assert without_bars(err) == ""
    assert main(["verify", str(tmp_path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 2


def test_verify_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"{tmp_path}: ")

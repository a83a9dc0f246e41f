"""Every verb on the way from a dense model to a compressed one."""

import json
import shlex
from pathlib import Path

import pytest

from tests.support import dense_models
from tests.support.command import error, result
from vllm_gac.cli import main
from vllm_gac.cli.budgets import print_budgets
from vllm_gac.planning.plan_file import Plan


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return dense_models.write(tmp_path / "dense", dense_models.config())


RUN_OPTIONS = ("--max-tokens", 512, "--sequence-length", 64)


def test_each_step_reads_what_the_one_before_wrote(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats, plan, out = tmp_path / "stats.safetensors", tmp_path / "plan.json", tmp_path / "out"
    ratios = ("--param-ratio", 0.9, "--kv-ratio", 0.75)

    calibrated = result(capsys, "calibrate", dense, "--text", text, "--out", stats, *RUN_OPTIONS)
    assert calibrated["out"] == str(stats)
    planned = result(capsys, "plan", dense, *ratios, "--out", plan)
    assert planned == json.loads(plan.read_text())
    made = result(capsys, "compress", dense, "--out", out, "--plan", plan, "--stats", stats)
    inspected = result(capsys, "inspect", out)

    assert made["parameters"] == inspected["parameters"] == planned["parameters"]["used"]
    assert made["parameters"] <= 0.9 * made["dense_parameters"]
    assert made["kv_bytes_per_token"] == inspected["kv_bytes_per_token"]
    assert made["kv_bytes_per_token"] <= 0.75 * made["dense_kv_bytes_per_token"]
    assert inspected["format"] == "gac"
    assert result(capsys, "inspect", "--verify", out)["ok"]
    measured = result(capsys, "evaluate", out, "--text", text, *RUN_OPTIONS)
    assert measured["perplexity"] > 1
    assert 0 < measured["tokens"] <= 512


def test_calibrate_refuses_before_it_warns(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No text is given, which is worth a warning only if the run begins."""
    compressed, out = tmp_path / "compressed", tmp_path / "stats.safetensors"
    made = ("compress", dense, "--out", compressed, "--param-ratio", 1, "--kv-ratio", 1, "--quiet")
    result(capsys, *made)
    assert "compressed" in error(capsys, "calibrate", compressed, "--out", out)


def test_compress_alone_plans_and_calibrates(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ["compress", dense, "--out", out, "--kv-ratio", 0.5, "--method", "heads"]
    assert main([*map(str, args), *map(str, RUN_OPTIONS), "--calibration", str(text)]) == 0
    said = capsys.readouterr().out
    assert f"vllm serve {out} --load-format gac" in said
    assert f"vllm-gac evaluate {out} --against {dense} --text HELD_OUT.txt" in said
    assert f"{out}: " in error(capsys, *args, "--calibration", text, "--quiet")


def test_the_next_command_can_be_copied(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dense.rename(tmp_path / "it's a model")
    plan = tmp_path / "a plan.json"
    args = ("plan", model, "--param-ratio", 0.8, "--out", plan)
    assert main([*map(str, args)]) == 0
    said = capsys.readouterr().out
    (hint,) = [line for line in said.splitlines() if line.startswith("Compress by it: ")]
    words = shlex.split(hint.removeprefix("Compress by it: "))
    assert words[:3] == ["vllm-gac", "compress", str(model)]
    assert words[words.index("--plan") + 1] == str(plan)


def test_gains_of_kernels_are_not_counted_as_gains_of_compression(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, fp8 = tmp_path / "plan.json", ("--quantization", "fp8_per_tensor")
    args = ("plan", dense, "--param-ratio", 1, "--gpu", "h200", *fp8, "--kv-cache-dtype", "fp8")
    assert main([*map(str, args), "--out", str(file)]) == 0
    said = capsys.readouterr().out
    made = Plan.model_validate_json(file.read_text())
    noted = made.notes["dense_nanoseconds"]
    assert made.nanoseconds is not None
    assert noted["our_kernels"] == pytest.approx(made.nanoseconds.used, abs=1)
    assert noted["our_kernels"] < noted["attention_backend_gac"] < made.nanoseconds.dense
    assert said.count(f"({noted['our_kernels'] / made.nanoseconds.dense:.1%})") == 3
    assert "--attention-backend GAC" in said
    before = made.model_copy(update={"notes": {"dense_nanoseconds": "of an older version"}})
    print_budgets(before)
    assert "dense on our kernels" not in capsys.readouterr().out


@pytest.mark.parametrize("out", [".", "..", "/", "dense/.."])
def test_an_output_needs_a_name_of_its_own(
    out: str,
    dense: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for args in (
        ("compress", dense, "--out", out, "--kv-ratio", 0.5, "--calibration", text),
        ("compress", dense, "--out", out, "--kv-ratio", 0.5, "--calibration", text, "--resume"),
        ("repair", dense, "--out", out),
        ("repair", dense, "--out", out, "--resume"),
        ("calibrate", dense, "--text", text, "--out", out),
        ("plan", dense, "--kv-ratio", 0.5, "--out", out),
    ):
        assert error(capsys, *args).startswith(f"{Path(out)}: "), args
    assert f"{Path(out)}: " in error(capsys, "import", dense, out)
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}

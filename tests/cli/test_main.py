"""The command prints results on stdout, all else on stderr, and one line for each mistake."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.command import RUN, command, error, result, usage
from tests.support.model_files import config, gac_config, write_model
from vllm_gac import __version__
from vllm_gac.cli import main

VERBS = (
    *("calibrate", "compress", "evaluate", "export", "generate", "heal", "import"),
    *("inspect", "plan", "profile", "repair"),
)  # fmt: skip
_EVALUATE = ("evaluate", "m", "--text", "t")
_HEAL = ("heal", "m", "--teacher", "t", "--text", "x", "--out", "o")


# ---- the command as such ---------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, expected in (("--version", f"vllm-gac {__version__}\n"), ("--help", "usage: ")):
        with pytest.raises(SystemExit) as exited:
            main([flag])
        assert exited.value.code == 0
        assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "VERB"),
        (["profiles"], "'profiles'"),
        (["inspect", ""], "''"),
        (["inspect", "hf://o/m"], "hf://o/m"),
        (["compress", "m", "--out", "s3://b/m"], "--out: s3://b/m"),
        (["evaluate", "m", "--text", "https://h/a.txt"], "--text: https://h/a.txt"),
        (["plan", "m", "--gpu", "h200"], "--param-ratio, --kv-ratio"),
        (["plan", "m", "--max-loss", "1"], "--max-loss: 1"),
        (["plan", "m", "--param-ratio", "0"], "--param-ratio: 0"),
        (["plan", "m", "--kv-ratio", "nan"], "--kv-ratio: nan"),
        (["plan", "m", "--method", "heads,magic"], "--method: heads,magic"),
        (["compress", "m", "--param-ratio", "0.8"], "--out"),
        (["compress", "m", "--out", "o"], "--param-ratio, --kv-ratio"),
        (["compress", "m", "--out", "o", "--plan", "p", "--kv-ratio", "1"], "--kv-ratio"),
        (["compress", "m", "--out", "o", "--plan", "p", "--method", "prune"], "--method"),
        (["compress", "m", "--out", "o", "--stats", "s", "--calibration", "c"], "--calibration"),
        ([*_HEAL, "--lora-rank", "0"], "--lora-rank: 0"),
        (["evaluate", "d"], "--text"),
        (["repair", "d", "--out", "o", "--overwrite"], "--overwrite"),
        (["evaluate", "d", "--text", "t", "--max-tokens", "-1"], "--max-tokens: -1"),
        ([*_EVALUATE, "--against", "b", "--engine", "vllm"], "--against"),
        ([*_EVALUATE, "--quantization", "fp8_per_tensor"], "--quantization"),
        ([*_EVALUATE, "--against-revision", "v1"], "--against-revision"),
        ([*_EVALUATE, "--device", "cuda", "--engine", "vllm"], "--device"),
        (["evaluate", "d", "--text", "a", "b", "--text", "c"], "--text"),
        (["plan", "m", "--method", "heads", "--method", "prune"], "--method"),
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
    code = (
        "import sys; from vllm_gac.cli import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as e: status = e.code\n"
        "sys.exit(status or ('torch' in sys.modules or 'vllm' in sys.modules) * 99)"
    )
    for args in (
        ["--help"],
        ["inspect", tmp_path / "model"],
        ["inspect", "--verify", tmp_path / "model"],
    ):
        assert command(*args, code=code).returncode == 0, args


def test_an_interrupt_while_modules_load_is_one_line() -> None:
    code = (
        "import signal, sys; from types import SimpleNamespace\n"
        "def find_spec(name, *_): name == 'numpy' and signal.raise_signal(signal.SIGINT)\n"
        f"sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))\n{RUN}"
    )
    done = command("--help", code=code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "vllm-gac: interrupted\n")


@pytest.mark.parametrize(
    ("package", "args"),
    [
        ("torch", ("evaluate", "m", "--text", "t")),
        ("vllm", ("evaluate", "m", "--text", "t", "--engine", "vllm")),
        ("vllm", ("generate", "m", "--out", "out.jsonl")),
    ],
)
def test_a_package_that_a_verb_needs_is_named(package: str, args: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\n{RUN}"
    done = command(*args, code=code)
    assert (done.returncode, done.stdout) == (1, "")
    (said,) = done.stderr.splitlines()
    assert f"'{args[0]}' needs {package}, which is not installed" in said


def test_a_missing_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cuda:99", "'tpu'"):
        line = ("evaluate", tmp_path, "--text", "t", "--device", device.strip("'"))
        assert f"--device {device}: " in error(capsys, *line)


def test_an_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
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
def test_a_full_disk_is_a_one_line_error(tmp_path: Path) -> None:
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
    assert main(["inspect", "--verify", str(evil)]) == 1
    (fault,) = capsys.readouterr().out.splitlines()
    assert r"x\r\u202e: " in fault


# ---- inspect and verify ----------------------------------------------------------------------


def test_inspect_joins_equal_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(write_model(tmp_path, config(num_hidden_layers=12)))]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0-11    rotary 2 x 16  2 x 16")


def test_verify_a_valid_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, config())
    assert main(["inspect", "--verify", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[-1], err) == ("ok: 21 tensors, 25,760 parameters", "")
    verified = {"ok": True, "faults": [], "tensors": 21, "parameters": 25760}
    assert verified.items() <= result(capsys, "inspect", "--verify", tmp_path).items()


def test_the_old_verb_is_taken_with_a_warning_and_not_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, config())
    assert main(["verify", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["ok: 21 tensors, 25,760 parameters"]
    assert "inspect --verify" in err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\n    verify" not in capsys.readouterr().out


def test_verify_names_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(
        tmp_path,
        config(),
        lambda tensors: tensors.pop("model.norm.weight"),
        fill={"lm_head.weight": b"\xff\x7f"},
    )
    assert main(["inspect", "--verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    missing, nan = out.splitlines()
    assert missing.startswith(f"{tmp_path}: model.norm.weight: ")
    assert nan.startswith(f"{tmp_path / 'model.safetensors'}: lm_head.weight: ")
    assert err == ""  # no progress bar where there is no terminal
    assert main(["inspect", "--verify", str(tmp_path), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 2

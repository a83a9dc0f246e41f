"""Users can type what --help shows."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.test_main import VERBS
from tests.support import dense_models
from vllm_gac.cli import main
from vllm_gac.gpu.profile_files import read_profile, shipped_profiles
from vllm_gac.options import options_of
from vllm_gac.planning.request import PlanRequest

# Options that keep the runs short.
FEW = ("--max-tokens", "512", "--sequence-length", "64", "--quiet")


def help_of(capsys: pytest.CaptureFixture[str], *verb: str) -> str:
    with pytest.raises(SystemExit):
        main([*verb, "--help"])
    return capsys.readouterr().out


def test_every_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dense_models.write(tmp_path / "MODEL", dense_models.config())
    dense_models.write_text(tmp_path / "TEXT")
    texts = [help_of(capsys), *(help_of(capsys, verb) for verb in VERBS)]
    examples = re.findall(r"^  (vllm(?:-gac)? .*)", "\n".join(texts), re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        program, *args = shlex.split(example)
        if program == "vllm":
            assert args == ["serve", "DIR", "--load-format", "gac"]
            assert main(["inspect", "--verify", args[1]]) == 0
            continue
        assert main([*args, *(FEW if args[0] == "compress" else ())]) == 0, example


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        (("--align", "none"), "vllm-gac plan"),
        (("--sequence-length", "64"), "vllm-gac calibrate"),
    ],
)
def test_options_that_go_are_taken_with_a_warning(
    option: tuple[str, ...], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("compress", "not-there", "--out", "out", "--kv-ratio", "0.5", "--device", "cpu")
    assert main([*line, *option]) == 1
    warning = capsys.readouterr().err.splitlines()[0]
    assert option[0] in warning
    assert instead in warning


def test_the_help_names_the_profiles_that_have_no_times_of_w4a16() -> None:
    said = options_of(PlanRequest)["quantization"].help
    for name in shipped_profiles():
        has_times = any(sweep.dtype == "w4a16" for sweep in read_profile(name).linear)
        assert (name in said) != has_times

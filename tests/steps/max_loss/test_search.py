"""compress --max-loss: models are written and measured until one is near the asked loss."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.command import error, result
from tests.support.dense_models import config, write, write_text
from tests.support.hub import files_of
from vllm_gac.demo import HELD_OUT, MODEL
from vllm_gac.options import record_of
from vllm_gac.planning.plan_file import Plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.inputs import CompressInputs
from vllm_gac.steps.max_loss.attempt import Attempt, record
from vllm_gac.steps.max_loss.search import MAX_TRIES, next_expected


def measured(planned_for: float, lost: float) -> Attempt:
    """A try whose interval ends `lost` nats above the dense model."""
    high = math.exp(lost)
    return Attempt(planned_for, planned_for, 1.0, high, high, high, 1000, [])


@pytest.mark.parametrize("times", [0.3, 0.6, 1.8, 3.4, 10.0])
@pytest.mark.parametrize("power", [0.8, 1.0, 1.4])
def test_few_tries_reach_the_asked_loss(times: float, power: float) -> None:
    """Whatever the curve is: the measured loss over the expected one, and how it bends."""
    most, tries = math.log1p(0.01), list[Attempt]()
    while (expected := next_expected(most, tries)) is not None:
        tries.append(measured(expected, times * most * (expected / most) ** power))
    assert len(tries) <= MAX_TRIES
    reached = [math.log(one.high) for one in tries if math.log(one.high) <= most]
    assert 0.7 * most < max(reached)


@pytest.mark.parametrize("times", [0.6, 1.8, 3.4])
def test_what_an_fp8_cache_loses_is_a_part_of_what_was_allowed(times: float) -> None:
    most, tries = math.log1p(0.01), list[Attempt]()
    while (allowed := next_expected(most, tries)) is not None:
        attempt = measured(allowed, times * allowed)
        tries.append(replace(attempt, expected_loss=0.4 * allowed, fp8_keys_loss=0.6 * allowed))
    reached = [math.log(one.high) for one in tries if math.log(one.high) <= most]
    assert 0.9 * most < max(reached)


def test_a_model_that_loses_nothing_measurable_is_followed_by_a_faster_one() -> None:
    most = math.log1p(0.01)
    after = next_expected(most, [measured(0.005, -0.001)])
    assert after is not None
    assert 0.005 < after <= 4 * 0.005


def test_a_plan_that_loses_too_much_is_not_made_again() -> None:
    most = math.log1p(0.01)
    expected = 0.5 * most
    after = next_expected(most, [replace(measured(most, 1.1 * most), expected_loss=expected)])
    assert after is not None
    assert after < expected


def test_recording_twice_writes_the_attempts_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"gac": {"source": {}}}')
    (tmp_path / "README.md").write_text("# A model\n")
    tries = [measured(0.0055, 0.013), measured(0.004, 0.008)]
    record(tmp_path, 0.01, tries[1], tries)
    written = files_of(tmp_path)
    record(tmp_path, 0.01, tries[1], tries)
    assert written == files_of(tmp_path)
    card = written["README.md"].decode()
    assert "| 0.0040 | 0.80 % | 0.80 to 0.80 % | 100.0% | this model |" in card
    source = json.loads(written["config.json"])["gac"]["source"]["max_loss"]
    assert (source["asked"], source["measured"]) == (0.01, source["tried"][1])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--max-loss", "1%"), "--held-out"),
        (("--max-loss", "1%", "--held-out", "text.txt"), "text.txt"),
        (("--kv-ratio", "0.5", "--held-out", "o.txt"), "--held-out"),
        (("--kv-ratio", "0.5", "--score", "true"), "--score"),
        (("--max-loss", "1%", "--score", "true", "--held-out", "text.txt"), "--held-out"),
        (("--max-loss", "1%", "--score", "no-such-program -x"), "no-such-program"),
        (("--max-loss", "1%", "--score", "'"), "--score"),
        (("--max-loss", "1%", "--score", ""), "--score"),
    ],
)
def test_invalid_max_loss_options_are_refused(
    args: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "dense", config())
    write_text(tmp_path / "text.txt")
    line = ("compress", "dense", "--out", "out", "--calibration", "text.txt", "--device", "cpu")
    assert said in error(capsys, *line, *args)
    assert not (tmp_path / "out.partial").exists()


def test_the_loss_that_a_plan_was_made_for_can_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, plan = tmp_path / "dense", tmp_path / "plan.json"
    write(dense, config())
    texts = [write_text(tmp_path / f"{name}.txt", n) for name, n in (("text", 3000), ("held", 999))]
    options = ("--minimize", "bytes", "--decode-batch", 8)
    result(capsys, "plan", dense, "--max-loss", "1%", *options, "--out", plan)

    def opened(held_out: list[Path]) -> CompressInputs:
        return CompressInputs.open(
            dense, plan, calibration=texts[:1], stats=None, held_out=held_out
        )

    inputs = opened(texts[1:])
    request = PlanRequest(max_loss=0.01, minimize="bytes", decode_batch=8)
    assert isinstance(inputs.plan, PlanRequest)
    assert record_of(inputs.plan) == record_of(request)
    assert inputs.held_out == texts[1:]
    assert isinstance(opened([]).plan, Plan)


HELD_OUT_CHARACTERS = 40_000  # as few as give intervals of about a percent


@pytest.mark.slow
def test_the_measured_loss_is_within_the_asked_one(
    demo_statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held-out.txt").write_text(HELD_OUT.read_text()[:HELD_OUT_CHARACTERS])
    common = ("--method", "heads,prune", "--device", "cpu", "--quiet")
    out = tmp_path / "out"
    line = ("compress", MODEL, "--out", out, "--stats", demo_statistics, "--max-loss", 0.04)
    held_out = ("--held-out", tmp_path / "held-out.txt")
    printed = result(capsys, *line, *held_out, *common)["max_loss"]
    source = json.loads((out / "config.json").read_text())["gac"]["source"]
    assert printed == source["max_loss"]
    measured = printed["measured"]
    assert 1 < measured["ratio"] < measured["high"] <= 1.04
    assert measured["time"] < 1
    # What was written is what was measured, says a verb that knows nothing of the loop.
    against = ("--against", MODEL, "--text", tmp_path / "held-out.txt", "--device", "cpu")
    again = result(capsys, "evaluate", out, *against, "--quiet")
    assert again["ratio"] == pytest.approx(measured["ratio"], rel=1e-6)

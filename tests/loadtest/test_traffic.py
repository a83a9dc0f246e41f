"""A scenario always gives the same schedule, which is read back from its file as written."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import loadtest
from loadtest.errors import LoadTestError
from loadtest.traffic.arrivals import Preset, arrival_times
from loadtest.traffic.generate import generate
from loadtest.traffic.lengths import length_table, length_tables
from loadtest.traffic.prompts import text, token_ids
from loadtest.traffic.scenario import Scenario, load_yaml
from loadtest.traffic.schedule import PromptRules, ScheduledRequest, read_schedule, write_schedule
from tests.loadtest.runs import scenario

# The coefficients of variation of gaps, by preset.
VARIATION: dict[Preset, float] = {
    "steady": 0, "poisson": 1, "azure-conversation": 1.1, "azure-code": 3.2, "alpaserve": 8
}  # fmt: skip
SHIPPED = sorted((Path(loadtest.__file__).parent / "scenarios").glob("*.yaml"))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    low = draw(st.integers(1, 1000))
    prefixes = {
        "share": draw(st.floats(0, 1)),
        "groups": draw(st.integers(1, 20)),
        "blocks": draw(st.integers(1, 5)),
    }
    sessions = {
        "turns": draw(st.floats(1, 8)),
        "think": draw(st.floats(0, 5)),
        "message": draw(st.integers(1, 200)),
    }
    return Scenario.model_validate(
        {
            "name": "drawn",
            "lengths": draw(st.sampled_from(sorted(length_tables()))),
            "rate": draw(st.floats(1, 20)),
            "duration": 20.0,
            "arrivals": draw(st.sampled_from(sorted(VARIATION))),
            "prefixes": draw(st.sampled_from([None, prefixes])),
            "sessions": draw(st.sampled_from([None, sessions])),
            "max_model_len": draw(st.none() | st.integers(2, 9000)),
            "block_tokens": draw(st.sampled_from([1, 16, 512])),
            "vocabulary": (low, low + 5000),
            "seed": draw(st.integers(0, 2**63 - 1)),
        }
    )


@settings(max_examples=30)
@given(drawn=scenarios())
def test_a_schedule_is_deterministic_survives_its_file_and_fits_the_context(
    drawn: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        schedule = generate(drawn)
    except LoadTestError:
        reject()  # a bursty process may be silent for so long
    assert generate(drawn) == schedule
    path = tmp_path_factory.mktemp("schedule") / "s.jsonl"
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule
    for request in schedule.requests:
        assert request.input_length >= 1
        assert request.output_length >= 1
        if drawn.max_model_len:
            assert request.input_length + request.output_length <= drawn.max_model_len
        assert len(request.hash_ids) == -(-request.input_length // drawn.block_tokens)
    assert [r.timestamp for r in schedule.requests] == sorted(
        r.timestamp for r in schedule.requests
    )
    # A turn begins with the prompt before it.
    for turns in schedule.sessions():
        requests = [schedule.requests[turn] for turn in turns]
        assert len(requests) == 1 or drawn.sessions is not None
        for before, after in pairwise(requests):
            assert after.timestamp == before.timestamp + after.delay < 1000 * drawn.duration
            assert after.input_length > before.input_length + before.output_length
            tokens = token_ids(after, 0, schedule.prompts)
            assert tokens[: before.input_length] == token_ids(before, 0, schedule.prompts)


def test_sessions_have_as_many_turns_and_pauses_as_asked() -> None:
    sessions_of = {"turns": 4, "think": 2, "message": 50}
    schedule = generate(scenario(rate=40, duration=1000, sessions=sessions_of, block_tokens=16))
    sessions = [[schedule.requests[turn] for turn in turns] for turns in schedule.sessions()]
    early = [turns for turns in sessions if turns[0].timestamp < 900_000]
    assert len(early) == pytest.approx(9000, rel=0.03)
    assert np.mean([len(turns) for turns in early]) == pytest.approx(4, rel=0.03)
    later = [(a, b) for turns in early for a, b in pairwise(turns)]
    assert np.mean([b.delay for _, b in later]) == pytest.approx(2000, rel=0.03)
    messages = [b.input_length - a.input_length - a.output_length for a, b in later]
    assert np.mean(messages) == pytest.approx(50, rel=0.03)
    prompts = sum(r.input_length for r in schedule.requests)
    again = sum(a.input_length for turns in sessions for a in turns[:-1])
    assert schedule.traffic["shared_prefix_fraction"] == pytest.approx(again / prompts)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_scenarios_say_what_they_are(path: Path) -> None:
    shipped = load_yaml(path, Scenario)
    schedule = generate(shipped)
    assert shipped.name == path.stem
    assert shipped.description
    assert schedule.traffic["truncated_fraction"] < 0.05


def test_lengths_do_not_depend_on_the_rate() -> None:
    path = next(path for path in SHIPPED if path.stem == "azure-conversation")
    slow, fast = (generate(load_yaml(path, Scenario, rate=rate)).requests for rate in (1.0, 4.0))
    lengths = [(r.input_length, r.output_length) for r in slow]
    assert lengths[:200] == [(r.input_length, r.output_length) for r in fast][:200]


def test_prefixes_are_shared_as_often_as_asked() -> None:
    lengths = {"input": 1000, "output": 1}
    prefixes = {"share": 0.5, "groups": 4, "blocks": 3}
    given = {"lengths": lengths, "prefixes": prefixes, "block_tokens": 100}
    schedule = generate(scenario(rate=100, duration=100, **given))
    first = np.array([request.hash_ids[0] for request in schedule.requests])
    shared = first < 12
    assert shared.mean() == pytest.approx(0.5, abs=0.03)
    # Zipf: 12 / 25 of them use the first of four prompts, which are blocks 0, 3, 6 and 9.
    assert (first[shared] == 0).mean() == pytest.approx(0.48, abs=0.04)
    assert set(first[shared]) == {0, 3, 6, 9}
    unshared = [i for r in schedule.requests for i in r.hash_ids if i >= 12]
    assert len(unshared) == len(set(unshared))
    assert schedule.traffic["shared_prefix_fraction"] == pytest.approx(0.15, abs=0.01)


def test_a_run_without_a_request_is_refused() -> None:
    with pytest.raises(LoadTestError, match="imaginary: "):
        generate(scenario(rate=0.001, duration=0.001))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "expected a mapping"),
        ("name: [", "not a readable YAML file"),
        ("{name: x, lengths: azure-code, rate: 1, duration: 1, tempo: 3}", "tempo: unknown key"),
        ("{name: x, lengths: azure, rate: 1, duration: 1}", "no length table 'azure'"),
        ("{name: x, lengths: azure-code, rate: 0, duration: 1}", "rate: Input should be greater"),
        ("{name: x, lengths: azure-code, rate: .nan, duration: 1}", "rate: Input should be"),
        (
            "{name: x, lengths: azure-code, rate: 1, duration: 1, slo: {tpot: .inf}}",
            "slo.tpot: Input should be a finite number",
        ),
        (
            "{name: x, lengths: azure-code, rate: 1, duration: 1, slo: {ttft: .inf}}",
            "slo.ttft: Input should be a finite number",
        ),
        (
            "{name: x, lengths: azure-code, rate: 1, duration: 1, arrivals: bursty}",
            "arrivals: Input should be 'steady', 'poisson'",
        ),
    ],
)
def test_a_wrong_scenario_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(LoadTestError) as caught:
        load_yaml(path, Scenario)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(length_tables()))
def test_a_schedule_has_the_marginals_of_the_trace_and_the_gaps_asked_for(name: str) -> None:
    preset = next((known for known in VARIATION if known == name), "poisson")
    whole = scenario(lengths=name, rate=4, duration=20_000, arrivals=preset)
    schedule = generate(whole)
    table = length_table(name)
    for side in ("input", "output"):
        drawn = np.array([getattr(r, f"{side}_length") for r in schedule.requests])
        # quantile(p) = v says of the trace exactly that F(v) >= p and F(v - 1) <= p, ties included.
        # So these bounds are the Kolmogorov-Smirnov distance to all that is known of the trace.
        for p, value in zip(table.probabilities, getattr(table, side), strict=True):
            assert np.mean(drawn <= value) >= p - 0.04
            assert np.mean(drawn < value) <= p + 0.04
    gaps = np.diff([r.timestamp for r in schedule.requests])  # whole milliseconds, as replayed
    assert gaps.std() / gaps.mean() == pytest.approx(VARIATION[preset], rel=0.05)


# ---- arrivals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "variation"), VARIATION.items())
def test_gaps_have_the_coefficient_of_variation(preset: Preset, variation: float) -> None:
    gaps = np.diff(arrival_times(preset, 100, 10_000, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-9)


@pytest.mark.parametrize(
    ("preset", "runs"), [("steady", 500), ("azure-conversation", 500), ("azure-code", 4000)]
)
def test_the_expected_count_is_rate_times_duration(preset: Preset, runs: int) -> None:
    # A renewal process that starts with an ordinary gap has (cv^2 - 1) / 2 arrivals too many:
    # 4 of 50 at cv 3. The standard error here is below 0.4.
    counts = [len(arrival_times(preset, 5, 10, np.random.default_rng(i))) for i in range(runs)]
    assert np.mean(counts) == pytest.approx(50, abs=1.5)


# ---- prompts -------------------------------------------------------------------------------------

RULES = PromptRules(block_tokens=16, low=100, high=5000, seed=7)


def prompt(length: int, *hash_ids: int) -> ScheduledRequest:
    return ScheduledRequest(timestamp=0, input_length=length, output_length=1, hash_ids=hash_ids)


@given(length=st.integers(1, 500), hashed=st.booleans(), index=st.integers(0, 10**6))
def test_token_ids_have_the_length_and_the_range(length: int, hashed: bool, index: int) -> None:
    blocks = range(-(-length // 16)) if hashed else ()
    ids = token_ids(prompt(length, *blocks), index, RULES)
    assert len(ids) == length
    assert all(type(i) is int and 100 <= i < 5000 for i in ids)
    assert len(text(prompt(length, *blocks), index, RULES).split()) == length


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    a = token_ids(prompt(40, 1, 2, 3), 0, RULES)
    b = token_ids(prompt(40, 1, 2, 4), 1, RULES)
    assert a[:32] == b[:32]
    assert a[32:] != b[32:]
    assert a[:16] != a[16:32]


def test_traces_without_blocks_share_nothing() -> None:
    firsts = {tuple(token_ids(prompt(8), index, RULES)) for index in range(100)}
    assert len(firsts) == 100

"""Generates the schedule of a scenario. The same scenario gives the same schedule, bit for bit.

Lengths, arrivals, prefixes and sessions draw from separate random streams, so that a change of the
rate does not change the lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.traffic.arrivals import arrival_times
from loadtest.traffic.lengths import length_table
from loadtest.traffic.scenario import FixedLengths, Scenario, Sessions, SharedPrefixes
from loadtest.traffic.schedule import PromptRules, Schedule, ScheduledRequest

Lengths = NDArray[np.int64]


class NoRequestError(LoadTestError):
    """By chance a schedule has no request; with another seed it may have some."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        session: The number of its session.
        timestamp: When it is due at the earliest, in ms: as if answers took no time.
        input: Tokens of its prompt.
        output: Tokens of its answer.
        delay: ms from the answer before it.
    """

    session: int
    timestamp: int
    input: int
    output: int
    delay: int = 0


def generate(scenario: Scenario) -> Schedule:
    """The schedule of a scenario. Raises NoRequestError if its duration contains no request."""
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(scenario.seed).spawn(6)]
    rate = scenario.rate / (1 if scenario.sessions is None else scenario.sessions.turns)
    times = arrival_times(scenario.arrivals, rate, scenario.duration, streams[1])
    if not len(times):
        raise NoRequestError(
            f"{scenario.name}: no request in {scenario.duration} s at {scenario.rate} per second "
            f"with seed {scenario.seed}; raise rate or duration"
        )
    input_lengths, output_lengths, cut = _lengths(scenario, len(times), streams[2], streams[3])
    starts = np.rint(times * 1000).astype(np.int64)
    firsts = zip(starts.tolist(), input_lengths.tolist(), output_lengths.tolist(), strict=True)
    turns = [Turn(number, *turn) for number, turn in enumerate(firsts)]
    if scenario.sessions is not None:
        turns = _with_later_turns(scenario, scenario.sessions, turns, streams[5])
    last = {turn.session: turn.input for turn in turns}
    longest = np.array([last[session] for session in range(len(times))])
    hash_ids, shared = _hash_ids(longest, scenario.block_tokens, scenario.prefixes, streams[4])
    requests = tuple(_request(scenario, turn, hash_ids[turn.session]) for turn in turns)
    # A turn's prompt is the beginning of the next one's.
    shared += sum(turn.input for turn in turns) - int(longest.sum())
    attribution = "fixed lengths"
    if isinstance(scenario.lengths, str):
        attribution = length_table(scenario.lengths).attribution
    low, high = scenario.vocabulary
    prompts = PromptRules(scenario.block_tokens, low, high, scenario.seed)
    traffic = {
        "scenario": scenario.model_dump(mode="json"),
        "attribution": attribution,
        **summary(times, requests, cut, shared),
    }
    return Schedule(requests, prompts, traffic)


def summary(
    times: NDArray[np.float64], requests: Sequence[ScheduledRequest], truncated: float, shared: int
) -> dict[str, Any]:
    """What a report says of traffic.

    Args:
        times: when requests, or sessions, come, in seconds.
        requests: all of them.
        truncated: the share of requests that were cut to the context.
        shared: how many tokens of all prompts an earlier prompt begins with.
    """
    gaps = np.diff(times)
    inputs = np.array([request.input_length for request in requests])
    outputs = np.array([request.output_length for request in requests])
    return {
        "requests": len(requests),
        "gap_cv": float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() else None,
        "input_length": summary_of_lengths(inputs),
        "output_length": summary_of_lengths(outputs),
        "truncated_fraction": truncated,
        "shared_prefix_fraction": float(shared / inputs.sum()),
    }


def _lengths(
    scenario: Scenario,
    count: int,
    input_rng: np.random.Generator,
    output_rng: np.random.Generator,
) -> tuple[Lengths, Lengths, float]:
    """Input and output lengths, cut to the context, and the fraction of requests that were cut."""
    inputs = _sampled(scenario, "input", count, input_rng)
    outputs = _sampled(scenario, "output", count, output_rng)
    if scenario.max_model_len is None:
        return inputs, outputs, 0.0
    if scenario.max_model_len < 2:
        raise LoadTestError(f"{scenario.name}: max_model_len must be at least 2")
    # The answer gets at most half of the context, and the prompt is cut to the rest.
    answer = np.minimum(outputs, max(scenario.max_model_len // 2, 1))
    answer = np.where(inputs + outputs > scenario.max_model_len, answer, outputs)
    prompt = np.minimum(inputs, scenario.max_model_len - answer)
    cut = float(np.mean((prompt != inputs) | (answer != outputs)))
    return prompt, answer, cut


def _sampled(
    scenario: Scenario, which: Literal["input", "output"], count: int, rng: np.random.Generator
) -> Lengths:
    if isinstance(scenario.lengths, FixedLengths):
        lengths = np.full(count, getattr(scenario.lengths, which))
    else:
        table = length_table(scenario.lengths)
        # Inverts the log-linearly interpolated quantiles.
        logs = np.interp(rng.random(count), table.probabilities, np.log(getattr(table, which)))
        lengths = np.rint(np.exp(logs)).astype(np.int64)
    scaled: Lengths = np.rint(lengths * getattr(scenario.scale, which)).astype(np.int64)
    return np.maximum(scaled, 1)


def _request(scenario: Scenario, turn: Turn, hash_ids: tuple[int, ...]) -> ScheduledRequest:
    return ScheduledRequest.model_construct(
        timestamp=turn.timestamp,
        input_length=turn.input,
        output_length=turn.output,
        hash_ids=hash_ids[: -(-turn.input // scenario.block_tokens)],
        session_id=None if scenario.sessions is None else turn.session,
        delay=turn.delay,
    )


def _hash_ids(
    input_lengths: Lengths,
    block_tokens: int,
    prefixes: SharedPrefixes | None,
    rng: np.random.Generator,
) -> tuple[list[tuple[int, ...]], int]:
    """The block ids of each prompt, and how many tokens of all prompts are shared prefixes."""
    count = len(input_lengths)
    blocks = -(-input_lengths // block_tokens)
    shared = np.zeros(count, dtype=np.int64)
    group = np.zeros(count, dtype=np.int64)
    first_own = 0
    if prefixes is not None:
        weights = 1 / np.arange(1, prefixes.groups + 1)
        group = rng.choice(prefixes.groups, count, p=weights / weights.sum())
        # Only whole blocks are shared, and every prompt has at least one token of its own: engines
        # never reuse a full prompt.
        fits = np.minimum(prefixes.blocks, (input_lengths - 1) // block_tokens)
        shared = np.where(rng.random(count) < prefixes.share, fits, 0)
        first_own = prefixes.groups * prefixes.blocks
    width = prefixes.blocks if prefixes else 0
    ends = first_own + np.cumsum(blocks - shared)
    ids = [
        (*range(g * width, g * width + s), *range(end - (b - s), end))
        for g, s, b, end in zip(
            group.tolist(), shared.tolist(), blocks.tolist(), ends.tolist(), strict=True
        )
    ]
    return ids, int(shared.sum()) * block_tokens


def summary_of_lengths(lengths: Lengths) -> dict[str, float]:
    """The mean and percentiles of tokens of prompts or answers."""
    p50, p95, p99 = np.percentile(lengths, [50, 95, 99], method="inverted_cdf")
    return {"mean": float(lengths.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def _with_later_turns(
    scenario: Scenario, sessions: Sessions, first: list[Turn], rng: np.random.Generator
) -> list[Turn]:
    """The first turns, one a session, and what follows them, in the order of their timestamps."""
    context, ends = scenario.max_model_len or math.inf, 1000 * scenario.duration
    counts = rng.geometric(1 / sessions.turns, len(first)) - 1
    more = int(counts.sum())
    pauses = np.rint(rng.exponential(1000 * sessions.think, more)).astype(np.int64)
    messages = np.maximum(np.rint(rng.exponential(sessions.message, more)), 1).astype(np.int64)
    answers = _sampled(scenario, "output", more, rng)
    draws = zip(pauses.tolist(), messages.tolist(), answers.tolist(), strict=True)
    turns: list[Turn] = []
    for turn, count in zip(first, counts.tolist(), strict=True):
        turns.append(turn)
        for pause, message, answer in list(islice(draws, count)):
            prompt = turn.input + turn.output + message
            turn = Turn(turn.session, turn.timestamp + pause, prompt, answer, pause)
            if turn.timestamp >= ends or prompt + answer > context:
                break
            turns.append(turn)
    return sorted(turns, key=lambda turn: turn.timestamp)

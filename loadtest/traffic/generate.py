"""Generates the schedule of a scenario. The same scenario gives the same schedule, bit for bit.

Lengths, arrivals, rate curve and prefixes draw from separate random streams, so that a change of
the rate does not change the lengths.
"""

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.traffic.arrivals import arrival_times
from loadtest.traffic.lengths import length_table, sample_lengths
from loadtest.traffic.rate_curves import rate_cells
from loadtest.traffic.scenario import FixedLengths, Scenario, SharedPrefixes
from loadtest.traffic.schedule import PromptRules, Schedule, ScheduledRequest

Lengths = NDArray[np.int64]


def generate(scenario: Scenario) -> Schedule:
    """The schedule of a scenario. Raises LoadTestError if its duration contains no request."""
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(scenario.seed).spawn(5)]
    edges, factors = rate_cells(scenario.curve, scenario.duration, streams[0])
    process = scenario.process
    times = arrival_times(process.process, process.cv, scenario.rate, edges, factors, streams[1])
    if not len(times):
        raise LoadTestError(
            f"{scenario.name}: no request in {scenario.duration} s at {scenario.rate} per second "
            f"with seed {scenario.seed}; raise rate or duration"
        )
    input_lengths, output_lengths, cut = _lengths(scenario, len(times), streams[2], streams[3])
    hash_ids, shared = _hash_ids(
        input_lengths, scenario.block_tokens, scenario.prefixes, streams[4]
    )
    requests = tuple(
        ScheduledRequest.model_construct(
            timestamp=int(time), input_length=int(tokens), output_length=int(answer), hash_ids=ids
        )
        for time, tokens, answer, ids in zip(
            np.rint(times * 1000), input_lengths, output_lengths, hash_ids, strict=True
        )
    )
    low, high = scenario.vocabulary
    prompts = PromptRules(scenario.block_tokens, low, high, scenario.seed)
    traffic = {
        "scenario": scenario.model_dump(mode="json"),
        "attribution": _attribution(scenario),
        "requests": len(requests),
        "requests_per_second": len(requests) / scenario.duration,
        "gap_cv": _cv(np.diff(times)),
        "input_length": _summary(input_lengths),
        "output_length": _summary(output_lengths),
        "truncated_fraction": cut,
        "shared_prefix_fraction": shared,
    }
    return Schedule(requests, prompts, traffic)


def _lengths(
    scenario: Scenario,
    count: int,
    input_rng: np.random.Generator,
    output_rng: np.random.Generator,
) -> tuple[Lengths, Lengths, float]:
    """Input and output lengths, cut to the context, and the fraction of requests that were cut."""
    if isinstance(scenario.lengths, FixedLengths):
        inputs = np.full(count, scenario.lengths.input)
        outputs = np.full(count, scenario.lengths.output)
    else:
        table = length_table(scenario.lengths)
        inputs = sample_lengths(table.probabilities, table.input, count, input_rng)
        outputs = sample_lengths(table.probabilities, table.output, count, output_rng)
    inputs = np.maximum(np.rint(inputs * scenario.scale.input), 1).astype(np.int64)
    outputs = np.maximum(np.rint(outputs * scenario.scale.output), 1).astype(np.int64)
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


def _hash_ids(
    input_lengths: Lengths,
    block_tokens: int,
    prefixes: SharedPrefixes | None,
    rng: np.random.Generator,
) -> tuple[list[tuple[int, ...]], float]:
    """The block ids of each request, and the fraction of prompt tokens in shared prefixes."""
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
    return ids, float(shared.sum() * block_tokens / input_lengths.sum())


def _attribution(scenario: Scenario) -> str:
    if isinstance(scenario.lengths, FixedLengths):
        return "fixed lengths"
    return length_table(scenario.lengths).attribution


def _summary(lengths: Lengths) -> dict[str, float]:
    p50, p95, p99 = np.percentile(lengths, [50, 95, 99], method="inverted_cdf")
    return {"mean": float(lengths.mean()), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def _cv(gaps: NDArray[np.float64]) -> float | None:
    if len(gaps) < 2 or gaps.mean() == 0:
        return None
    return float(gaps.std() / gaps.mean())

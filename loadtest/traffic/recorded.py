"""Traffic of one's own: a recorded trace at a rate, and prompts from a file."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from pydantic import JsonValue, ValidationError

from loadtest.errors import LoadTestError, faults
from loadtest.traffic.generate import summary, summary_of_lengths
from loadtest.traffic.scenario import Slo
from loadtest.traffic.schedule import Schedule, ScheduledRequest, read_schedule

_CHARACTERS_PER_TOKEN = 4  # of English and of code, about


def recorded_rate(path: Path) -> float:
    """Requests per second of a trace as it was recorded."""
    trace = read_schedule(path)
    if trace.duration == 0:
        raise LoadTestError(f"{path}: all its requests come at once, so it has no rate")
    return (len(trace.requests) - 1) / trace.duration


def highest_rate(path: Path, seconds: float) -> float:
    """The highest rate at which a trace lasts so many seconds."""
    return (len(read_schedule(path).requests) - 1) / seconds


def from_trace(path: Path, rate: float, seconds: float, seed: int, slo: Slo) -> Schedule:
    """The first `seconds` of a trace whose time is stretched to `rate` requests per second.

    Its prompts are drawn from `seed`, but for those that stand in bodies.

    Raises LoadTestError if the trace cannot be read, or if it is over before `seconds` are.
    """
    recorded, trace = recorded_rate(path), read_schedule(path)
    stretch = recorded / rate
    if (lasts := trace.duration * stretch) < seconds * (1 - 1e-9):
        raise LoadTestError(
            f"{path}: lasts {lasts:.4g} s at {rate:.4g} requests per second, and a step "
            f"{seconds:g} s; make steps shorter, or take a longer trace or a lower rate"
        )
    requests = []
    for request in trace.requests:
        if (moved := round(request.timestamp * stretch)) < 1000 * seconds:
            requests.append(request.model_copy(update={"timestamp": moved}))
    about = f"{path.name}, recorded at {recorded:.3g} requests per second"
    scenario = {
        "name": path.stem,
        "description": " ".join((f"A replay of {about}.", *trace.notes)),
        "rate": rate,
        "duration": seconds,
        "slo": slo.model_dump(mode="json"),
    }
    times = np.array([request.timestamp / 1000 for request in requests])
    shared = _shared(requests, trace.prompts.block_tokens)
    traffic = {"scenario": scenario, "attribution": about}
    traffic |= summary(times, requests, 0.0, shared)
    return Schedule(tuple(requests), dataclasses.replace(trace.prompts, seed=seed), traffic)


def _shared(requests: list[ScheduledRequest], block_tokens: int) -> int:
    """How many tokens of all prompts are in blocks that an earlier prompt had."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        known = seen.intersection(request.hash_ids)
        shared += min(len(known) * block_tokens, request.input_length)
        seen.update(request.hash_ids)
    return shared


def with_prompts(schedule: Schedule, path: Path, seed: int) -> Schedule:
    """The same arrivals and lengths of answers, with the prompts of a file in random order.

    None is sent a second time before all were sent once. How many tokens they have is the server's
    to say: their lengths here are estimates.
    """
    prompts, order = read_prompts(path), np.random.default_rng(seed)
    count = len(schedule.requests)
    rounds = [order.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))]
    chosen = [prompts[number] for number in np.concatenate(rounds)[:count].tolist()]
    lengths = np.array([-(-_characters(prompt) // _CHARACTERS_PER_TOKEN) for prompt in chosen])
    requests = tuple(
        request.model_copy(
            update={"body": request.body | prompt, "hash_ids": (), "input_length": length}
        )
        for request, prompt, length in zip(schedule.requests, chosen, lengths.tolist(), strict=True)
    )
    estimate = f"prompts of {path.name}, by {_CHARACTERS_PER_TOKEN} characters a token"
    about = {
        "input_length": summary_of_lengths(lengths),
        "truncated_fraction": 0.0,
        "shared_prefix_fraction": None,
        "attribution": f"{estimate}; answers: {schedule.traffic['attribution']}",
    }
    return dataclasses.replace(schedule, requests=requests, traffic=schedule.traffic | about)


def _characters(body: dict[str, JsonValue]) -> int:
    """Of a prompt or of messages, with what JSON adds to them."""
    return len(json.dumps(body.get("prompt", body.get("messages")), ensure_ascii=False))


def read_prompts(path: Path) -> list[dict[str, JsonValue]]:
    """The bodies of a file of prompts: {"prompt": "..."} or {"messages": [...]} a line.

    Raises LoadTestError, which names the file and the line, for anything else.
    """
    bodies = []
    try:
        # Iterated, because str.splitlines() also splits at what a prompt may hold, such as U+2028.
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where, body = f"{path}:{number}", json.loads(line)
                if not isinstance(body, dict) or not {"prompt", "messages"} & body.keys():
                    raise LoadTestError(f"{where}: expected an object with a prompt or messages")
                bodies.append(
                    ScheduledRequest(timestamp=0, input_length=1, output_length=1, body=body).body
                )
    except ValidationError as error:
        raise LoadTestError(f"{where}: {faults(error)[0]}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LoadTestError(f"{path}: no prompts can be read from it: {error}") from error
    if not bodies:
        raise LoadTestError(f"{path}: has no prompt")
    return bodies

"""The turns of conversations: what follows each first prompt."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from loadtest.traffic.scenario import Sessions

Lengths = NDArray[np.int64]


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


def first_turns(starts: Lengths, inputs: Lengths, outputs: Lengths) -> list[Turn]:
    """One turn a session, in the order of their starts (ms)."""
    lengths = zip(starts.tolist(), inputs.tolist(), outputs.tolist(), strict=True)
    return [Turn(number, *turn) for number, turn in enumerate(lengths)]


def with_later_turns(
    first: list[Turn],
    sessions: Sessions,
    answers: Callable[[int], Lengths],
    ends: float,
    context: float,
    rng: np.random.Generator,
) -> list[Turn]:
    """The first turns and what follows them, in the order of their timestamps.

    Args:
        first: One turn a session.
        sessions: How many turns follow, when, and with how long a message.
        answers: Draws so many lengths of answers.
        ends: Later than that, in ms, no turn begins.
        context: Tokens of a prompt and its answer, at most.
        rng: Where turns, pauses and messages are drawn from.
    """
    counts = rng.geometric(1 / sessions.turns, len(first)) - 1
    more = int(counts.sum())
    pauses = np.rint(rng.exponential(1000 * sessions.think, more)).astype(np.int64)
    messages = np.maximum(np.rint(rng.exponential(sessions.message, more)), 1).astype(np.int64)
    draws = zip(pauses.tolist(), messages.tolist(), answers(more).tolist(), strict=True)
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

"""Draw what was tried for an asked loss: measured loss against predicted time, or bytes."""

import math
from collections.abc import Sequence

from vllm_gac.planning.loss_range import USUALLY_OVER_EXPECTED
from vllm_gac.planning.picture import Box, Line, Picture, Shape, Text
from vllm_gac.steps.tries import Try

_INK, _FAINT, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_MEASURED, _CHOSEN, _UNHEALED = "#2f7ed8", "#4c9f70", "#8064a2"
_EXPECTED, _ASKED = "#f0883e", "#d64545"
_WIDTH, _HEIGHT = 680, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 650.0, 116.0, 388.0
_MAX_TICKS = 7


def draw_tries(asked: float, best: Try, tries: Sequence[Try]) -> Picture:
    """Draw every try with its interval, what was expected, the asked loss, and the chosen model.

    To the left is faster or smaller, below is less loss. The dense model is at 100 % and loss 0.

    Args:
        asked: The most that the perplexity may be higher by, as a share.
        best: The model that was chosen, one of `tries`.
        tries: All models that were written and measured.
    """
    expected = sorted(
        [(1.0, 0.0)]
        + [(one.size, math.expm1(USUALLY_OVER_EXPECTED * one.expected_loss)) for one in tries]
    )
    across = _Axis.over([size for size, _ in expected], _LEFT, _RIGHT)
    ends = [ratio - 1 for one in tries for ratio in (one.low, one.high, one.unhealed or one.high)]
    up = _Axis.over([asked, *ends, *(loss for _, loss in expected)], _BOTTOM, _TOP)
    parts: list[Shape] = []
    for value in across.ticks:
        x = across.place(value)
        parts += [Line(((x, _TOP), (x, _BOTTOM)), _GRID, 1)]
        parts += [_text(x, _BOTTOM + 17, f"{100 * value:g} %", middle=True)]
    for value in up.ticks:
        y = up.place(value)
        parts += [Line(((_LEFT, y), (_RIGHT, y)), _GRID, 1)]
        parts += [_text(_LEFT - 34, y + 4, f"{100 * value:g} %", middle=True)]
    parts += [
        Line([(across.place(size), up.place(loss)) for size, loss in expected], _EXPECTED),
        Line(((_LEFT, up.place(asked)), (_RIGHT, up.place(asked))), _ASKED, dashed=True),
    ]
    for number, one in enumerate(tries, start=1):
        x, colour = across.place(one.size), _CHOSEN if one is best else _MEASURED
        low, y, high = (up.place(ratio - 1) for ratio in (one.low, one.ratio, one.high))
        parts += [Line(((x, low), (x, high)), colour, 2)]
        parts += [Line(((x - 5, end), (x + 5, end)), colour, 2) for end in (low, high)]
        parts += [Box(x - 4, y - 4, 8, 8, colour), _text(x + 9, y + 4, str(number))]
        if one.unhealed is not None:
            parts += [Box(x - 3, up.place(one.unhealed - 1) - 3, 6, 6, _UNHEALED)]
    parts += _legend(asked, best.minimized, any(one.unhealed is not None for one in tries))
    return Picture(_WIDTH, _HEIGHT, parts)


class _Axis:
    """Where values lie on an axis whose ticks are round numbers."""

    def __init__(self, least: int, most: int, step: float, begin: float, end: float) -> None:
        self.ticks = [round(number * step, 9) for number in range(least, most + 1)]
        self._begin, self._end = begin, end

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float) -> "_Axis":
        """An axis from pixel `begin` to `end` over all `values`, with few ticks."""
        low, high = min(values), max(values)
        span = max(high - low, 1e-4)
        step = 10.0 ** math.floor(math.log10(span / _MAX_TICKS))
        for times in (1, 2, 5, 10):
            least, most = math.floor(low / (times * step)), math.ceil(high / (times * step))
            if most - least <= _MAX_TICKS:
                break
        return cls(least, max(most, least + 1), times * step, begin, end)

    def place(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])
        return self._begin + share * (self._end - self._begin)


def _legend(asked: float, minimized: str, healed: bool) -> list[Shape]:
    """The title, what each colour means, and the names of the axes."""
    parts: list[Shape] = [Text(_LEFT, 24, f"Loss against {minimized}", 15, _INK, middle=False)]
    meanings = [
        (_CHOSEN, "this model, measured, with its 95 % interval"),
        (_MEASURED, "other models that were tried, in their order"),
        (_EXPECTED, f"{USUALLY_OVER_EXPECTED} times the expected loss: usual"),
        (_ASKED, f"asked for: at most {asked:.2%}"),
        *([(_UNHEALED, "measured before healing")] if healed else []),
    ]
    for index, (colour, meaning) in enumerate(meanings):
        x, y = _LEFT + 300 * (index % 2), 44.0 + 18 * (index // 2)
        parts += [Box(x, y - 9, 10, 10, colour), _text(x + 16, y, meaning)]
    middle = (_LEFT + _RIGHT) / 2
    return [
        *parts,
        _text(_LEFT - 60, _TOP - 12, "perplexity higher by"),
        _text(middle, _HEIGHT - 14, f"{minimized}, of the dense model's", middle=True),
    ]


def _text(x: float, y: float, text: str, middle: bool = False) -> Text:
    return Text(x, y, text, 12, _FAINT if middle else _INK, middle)

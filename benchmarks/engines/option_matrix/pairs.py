"""Few rows in which every two levels of two factors meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def all_pairs(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]
) -> tuple[list[Row], list[Pair]]:
    """Rows that have a level of every factor, and the pairs that no allowed row has.

    Greedy: each row begins with a pair that is still wanted and takes, factor by factor, the level
    that meets most others for the first time. `allowed` is asked for parts of rows, too.
    """
    wanted = {pair: None for pair in _pairs(factors) if allowed(dict(pair))}
    impossible = [pair for pair in _pairs(factors) if pair not in wanted]
    rows = []
    while wanted:
        first = next(iter(wanted))
        row = _completed(dict(first), factors, allowed, wanted)
        if row is None:
            impossible.append(first)
            del wanted[first]
            continue
        rows.append(row)
        for pair in _met(row, factors):
            wanted.pop(pair, None)
    return rows, impossible


def _completed(
    row: Row,
    factors: Mapping[str, Sequence[str]],
    allowed: Callable[[Row], bool],
    wanted: Mapping[Pair, None],
) -> Row | None:
    """`row` with a level of every factor; None if none is allowed. Goes back where it must."""
    rest = [factor for factor in factors if factor not in row]
    if not rest:
        return row
    factor = rest[0]

    def gain(level: str) -> int:
        return sum(pair in wanted for pair in _met(row | {factor: level}, factors))

    for level in sorted(factors[factor], key=gain, reverse=True):
        tried = row | {factor: level}
        if allowed(tried):
            whole = _completed(tried, factors, allowed, wanted)
            if whole is not None:
                return whole
    return None


def _pairs(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every two levels of two factors; factors in the order of `factors`."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(factors, 2)
        for a in factors[first]
        for b in factors[second]
    ]


def _met(row: Row, factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    chosen = [(factor, row[factor]) for factor in factors if factor in row]
    return list(combinations(chosen, 2))

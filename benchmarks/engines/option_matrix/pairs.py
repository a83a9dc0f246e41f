"""A few rows in which every two levels of two factors meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def all_pairs(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]
) -> tuple[list[Row], list[Pair]]:
    """Cover all pairs of levels with few rows, greedily.

    Each row begins with a pair that no row has yet. Factor by factor, it then takes the level that
    forms the most new pairs.

    Args:
        factors: The levels of each factor.
        allowed: Whether a row, or a part of one, is possible.

    Returns:
        The rows, each with a level of every factor, and the pairs that no allowed row has.
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
    """Complete `row` with a level of every factor, by backtracking; None if that is impossible."""
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
    """Every pair of levels of two factors, in the order of `factors`."""
    return [
        ((first, a), (second, b))
        for first, second in combinations(factors, 2)
        for a in factors[first]
        for b in factors[second]
    ]


def _met(row: Row, factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    chosen = [(factor, row[factor]) for factor in factors if factor in row]
    return list(combinations(chosen, 2))

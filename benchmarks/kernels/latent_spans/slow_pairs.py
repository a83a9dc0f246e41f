"""Which rotary pairs turn slowly, and the polynomials of a token's place that replace them.

A score is q R(t) U c: query, rotation by t tokens, up-projection, latent. Let t = center + s in a
span of tokens. A pair of f radians per token adds cos(f s) (A c) + sin(f s) (B c), where the rows A
and B are made of U and of the query, rotated back by `center`. If the pair turns slowly, cos(f s)
and sin(f s) are polynomials of s of low degree, to a small error. All slow pairs together then add
the sum over j of T_j(x) (w_j . c), where x = s / (half a span) and T_j are Chebyshev's polynomials:
a few vectors w_j in the latent space for each query head and span. Nothing of a slow pair is
rebuilt or rotated token by token.
"""

import math
from dataclasses import dataclass

import torch

# The largest error of a slow pair's cosine and sine: what bf16 resolves near 1 is 4e-3.
TOLERANCE = 2e-3
# Numbers of polynomials that the kernel can add up.
TERMS = (2, 4, 8)
# A matrix instruction adds over 16 numbers, and a pair has two.
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class PairSplit:
    """Which rotary pairs of a head turn fast, and how the slow ones are approximated.

    fast, slow: indices of pairs, ascending. span: tokens. terms: polynomials, of degrees 0 to
    terms - 1. error: the largest one of a slow pair's cosine and sine; 0 if no pair is slow.
    """

    fast: tuple[int, ...]
    slow: tuple[int, ...]
    span: int
    terms: int
    error: float


@dataclass(frozen=True, slots=True)
class SpanKeys:
    """What the kernel takes in place of up-projections; split_kv.py has the shapes."""

    split: PairSplit
    fast_up: torch.Tensor
    slow_up: torch.Tensor
    fast_pair: torch.Tensor
    fast_freq: torch.Tensor
    slow_pair: torch.Tensor
    slow_freq: torch.Tensor
    slow_coefficients: torch.Tensor


def split_pairs(
    inv_freq: torch.Tensor, span: int, terms: int, tolerance: float = TOLERANCE
) -> PairSplit:
    """Choose the fast pairs: those whose error exceeds `tolerance`, and more up to a power of two.

    Pairs that fill up the power of two cost nothing: the kernel would multiply padding instead.

    Args:
        inv_freq: radians per token of each pair, [pairs].
        span: tokens of a span.
        terms: polynomials; one of TERMS.
        tolerance: of cosine and sine.

    Raises:
        ValueError: the kernel has no sum of so many polynomials.
    """
    if terms not in TERMS:
        raise ValueError(f"{terms} polynomials: the kernel adds up one of {TERMS}; choose one")
    errors = polynomial_errors(inv_freq, span, terms).tolist()
    pairs = len(errors)
    worst_first = sorted(range(pairs), key=lambda pair: -errors[pair])
    fast = min(pairs, _padded(sum(error > tolerance for error in errors)))
    slow = worst_first[fast:]
    return PairSplit(
        tuple(sorted(worst_first[:fast])),
        tuple(sorted(slow)),
        span,
        terms,
        max((errors[pair] for pair in slow), default=0.0),
    )


def polynomial_errors(inv_freq: torch.Tensor, span: int, terms: int) -> torch.Tensor:
    """The largest error of cosine and sine of each pair within a span.

    Args:
        inv_freq: radians per token, [pairs].
        span: tokens.
        terms: polynomials; those of even degree make cosines, those of odd degree sines.

    Returns:
        fp64 [pairs].
    """
    x = torch.linspace(-1, 1, 257, dtype=torch.float64)
    angle = inv_freq.double().cpu()[:, None] * (span / 2) * x
    basis = torch.cos(torch.arange(terms, dtype=torch.float64)[:, None] * x.acos())
    made = coefficients(inv_freq, span, terms).double()
    cos_error = (made[0::2].T @ basis[0::2] - angle.cos()).abs().amax(1)
    sin_error = (made[1::2].T @ basis[1::2] - angle.sin()).abs().amax(1)
    return torch.maximum(cos_error, sin_error)


def coefficients(inv_freq: torch.Tensor, span: int, terms: int) -> torch.Tensor:
    """Coefficients of Chebyshev's polynomials: of cosines in even rows, of sines in odd rows.

    They are those of Chebyshev's series, cut off. Its error is within a small factor of the least
    one that polynomials of these degrees can have (Trefethen, Approximation Theory, chapter 16).

    Args:
        inv_freq: radians per token, [pairs].
        span: tokens; x = -1 and 1 are half a span away from the center.
        terms: polynomials.

    Returns:
        fp32 [terms, pairs], on the CPU.
    """
    nodes = 64  # many more than the polynomials, so the sum below is the integral
    at = (torch.arange(nodes, dtype=torch.float64) + 0.5) * (math.pi / nodes)
    angle = inv_freq.double().cpu()[:, None] * (span / 2) * at.cos()
    # The coefficient j of a function g(cos u) is 2 / pi times the integral of g(cos u) cos(j u).
    waves = torch.cos(torch.arange(terms, dtype=torch.float64)[:, None] * at)
    cos, sin = waves @ angle.cos().T * (2 / nodes), waves @ angle.sin().T * (2 / nodes)
    cos[0] /= 2
    even = torch.arange(terms)[:, None] % 2 == 0
    return torch.where(even, cos, sin).float()


def span_keys(up: torch.Tensor, inv_freq: torch.Tensor, split: PairSplit) -> SpanKeys:
    """Order up-projections by fast and slow pairs, each padded to a power of two.

    Args:
        up: [key_heads, group * head_dim, key_size]; the low halves of a head's pairs come first.
        inv_freq: radians per token, [head_dim / 2].
        split: of these pairs.

    Returns:
        Tensors on the device of `up`. Up-projections and coefficients of padding are 0.
    """
    heads, _, key_size = up.shape
    rows = up.view(heads, -1, 2, inv_freq.shape[0], key_size)
    fast, slow = _padded_indices(split.fast), _padded_indices(split.slow)
    fast_up = rows[:, :, :, fast.to(up.device)]
    fast_up[:, :, :, len(split.fast) :] = 0
    slow_up = rows[:, :, :, slow.to(up.device)].transpose(2, 3).half().contiguous()
    slow_up[:, :, len(split.slow) :] = 0
    frequency = inv_freq.float().cpu()
    slow_coefficients = coefficients(frequency[slow], split.span, split.terms)
    slow_coefficients[:, len(split.slow) :] = 0
    return SpanKeys(
        split,
        fast_up.contiguous(),
        slow_up,
        fast.int().to(up.device),
        frequency[fast].to(up.device),
        slow.int().to(up.device),
        frequency[slow].to(up.device),
        slow_coefficients.to(up.device),
    )


def _padded_indices(pairs: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(pairs + (0,) * (_padded(len(pairs)) - len(pairs)))


def _padded(pairs: int) -> int:
    """The number of pairs rounded up to a power of two, and to what a product needs."""
    return max(_FEWEST, 1 << max(0, pairs - 1).bit_length())

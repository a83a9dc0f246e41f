"""Random low-rank linears, computed by the kernel of both factors and by torch.

    python -m tests.kernels.both_factors_cases [gpu]

compares the results in Triton's interpreter (TRITON_INTERPRET=1), or on a GPU. The interpreter runs
one program after the other, so phases are launched apart there, or one program does all of them.
"""

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_gac.kernels import both_factors
from vllm_gac.kernels.both_factors import Factors, Shape, low_rank, shape_for

CASES = 15
FP8 = torch.float8_e4m3fn
_SCRATCH = both_factors._scratch


def poisoned(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Scratch that is full of NaN."""
    scratch = _SCRATCH(elements, dtype, device)
    scratch.view(torch.uint8).fill_(0xFF)
    return scratch


def check(seed: int, device: str) -> None:
    """The kernel agrees with torch in fp32. Numbers that it need not read are NaN."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    is_gpu = device == "cuda"
    is_scaled = rng.random() < 0.5
    # The interpreter multiplies no bf16 and rounds to no e4m3: scales are tested without.
    dtype = torch.float16 if not is_gpu else FP8 if is_scaled else torch.bfloat16
    grain = 16 // dtype.itemsize
    is_gated = rng.random() < 0.4
    count = 2 if is_gated else rng.choice([1, 2, 3])
    tokens = rng.choice([1, 3, 16, 17, 40, 130] if is_gpu else [1, 3, 17, 40])
    width = grain * rng.choice([1, 70, 200, 200])
    outputs = [rng.choice([2, 31, 70, 200]) for _ in range(count)]
    if is_gated:
        outputs = outputs[:1] * 2
    features = 64
    shape = Shape(
        programs=rng.choice([132, 64] if is_gpu else [1, 6, 48]),
        rows=rng.choice([16, 32, 64] if is_gpu else [16, 32]),
        features=features,
        step=features if is_scaled else rng.choice([64, 128]),
        warps=4,
        stages=rng.choice([1, 3]),
        ahead=rng.choice([64, 256]) if is_gpu else 0,  # the interpreter knows no prefetch
        begins_early=is_gpu and rng.random() < 0.5,
    )

    def scale_of(rows: int, by_channel: bool) -> torch.Tensor:
        size = (rows, 1) if by_channel else (1,)
        return (0.5 + torch.rand(size, generator=generator)).to(device)

    def within_nan(rows: int, columns: int) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=generator) / columns**0.25
        padded = torch.full((rows + 8, columns), float("nan")).to(dtype)
        padded[4 : rows + 4] = numbers.to(dtype)
        return padded.to(device)[4 : rows + 4]

    x = within_nan(tokens, width + grain)[:, :width]
    by_channel = rng.random() < 0.5
    x_scales = scale_of(tokens, True) if is_scaled else None
    linears, expected = [], []
    for out in outputs:
        rank = grain * rng.choice([2, 3, 9, 20])
        linear = Factors(within_nan(rank, width), within_nan(out, rank))
        latents = x.float() @ linear.down.float().T
        if x_scales is None:
            result = latents.to(dtype).float() @ linear.up.float().T
        else:
            of_down, of_up = scale_of(rank, by_channel), scale_of(out, by_channel)
            linear = replace(linear, down_scale=of_down, up_scale=of_up)
            latents = latents * x_scales * of_down.view(-1)
            latents = quantized_by_group(latents, features) if is_gpu else latents
            result = latents @ linear.up.float().T * of_up.view(-1)
        linears.append(linear)
        expected.append(result)
    reference = torch.cat(expected, dim=1)
    if is_gated:
        reference = torch.nn.functional.silu(expected[0]) * expected[1]
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    for again in range(2):  # the counter serves again
        apart = shape.programs > 1 if not is_gpu else bool(again)
        got = low_rank(
            x, linears, shape, counter, x_scales=x_scales, is_gated=is_gated, apart=apart
        )
        assert got.dtype == (torch.bfloat16 if dtype == FP8 else dtype)
        error = (got.float() - reference).norm() / reference.norm()
        assert got.shape == reference.shape
        # A latent at the border between two numbers of e4m3 may become either.
        assert float(error) < (3e-2 if dtype == FP8 else 1e-2), (seed, float(error), shape)
        assert is_at_rest(counter)


def check_replays(
    dtype: torch.dtype, is_gated: bool, is_early: bool, patch: Callable[..., object]
) -> None:
    """A thousand replays of three launches with one counter give the same bits.

    Scratch and outputs are poisoned before each. `patch` is setattr, or undoes itself.
    """
    held: list[torch.Tensor] = []

    def kept(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        held.append(_SCRATCH(elements, dtype, device))
        return held[-1]

    patch(both_factors, "_scratch", kept)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        numbers: torch.Tensor = torch.randn(rows, columns, generator=generator) / columns**0.25
        return numbers.to(device="cuda", dtype=dtype)

    tokens, width = 48, 4096
    x, one = draw(tokens, width), torch.ones(1, device="cuda")
    scales = (one, one) if dtype == FP8 else (None, None)
    pair = [Factors(draw(1600, width), draw(2048, 1600), *scales) for _ in range(2)]
    by_token = torch.ones(tokens, 1, device="cuda") if dtype == FP8 else None
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    shape = replace(shape_for(tokens, x.element_size(), programs), begins_early=is_early)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")

    def three() -> list[torch.Tensor]:
        return [
            low_rank(x, pair, shape, counter, x_scales=by_token, is_gated=is_gated)
            for _ in range(3)
        ]

    expected = three()[0].clone()
    torch.cuda.synchronize()
    held.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = three()
    for replay in range(1000):
        for tensor in held:
            tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        for mine in got:
            assert torch.equal(mine, expected), replay
    assert is_at_rest(counter)


def is_at_rest(counter: torch.Tensor) -> bool:
    """Whether as many programs have left barriers as have come."""
    return int(counter) in (0, -(2**31))


def quantized_by_group(latents: torch.Tensor, group: int) -> torch.Tensor:
    """What e4m3 and a scale for each group of a token's latents keep of them."""
    rounded = []
    for part in torch.split(latents, group, dim=1):
        scale = (part.abs().amax(1, keepdim=True) / 448).clamp_min(1 / (448 * 512))
        rounded.append((part / scale).clamp(-448, 448).to(FP8).float() * scale)
    return torch.cat(rounded, dim=1)


if __name__ == "__main__":
    both_factors._scratch = poisoned
    is_on_gpu = sys.argv[1:] == ["gpu"]
    for seed in range(40 if is_on_gpu else CASES):
        check(seed, "cuda" if is_on_gpu else "cpu")
        print("checked", seed, flush=True)
    for dtype, is_gated, is_early in itertools.product((torch.bfloat16, FP8), (0, 1), (0, 1)):
        if is_on_gpu:
            check_replays(dtype, bool(is_gated), bool(is_early), setattr)
            print("replayed", dtype, is_gated, is_early, flush=True)

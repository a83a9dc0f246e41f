"""Low-rank linears multiplied out while loading: W = B @ A, in fp32, on the device that serves.

The two factors of a linear are read one after the other, and arrive near each other in any order.
The first waits for the second, so that few linears are held at once.
"""

from collections.abc import Iterable, Iterator

import torch
from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout


def check_has_factors(stored: ModelLayout) -> None:
    """Raise CheckpointError if no linear of the model is low rank."""
    if not stored.low_rank_linears:
        raise CheckpointError(
            "--model-loader-extra-config: merge_factors: no linear of this model is low rank, so "
            "there are no factors to multiply; leave it out"
        )


def merged_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, finite_check: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors` with one weight in place of the two factors of each low-rank linear.

    Args:
        tensors: Names and tensors of a model's layout.
        dtype: The dtype that serves. Each product is rounded to it, once.
        finite_check: Whether to check that each product is finite.

    Raises:
        CheckpointError: A product is not finite.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        match name.rsplit(".", 2):
            case [linear, "B", "bias"]:
                yield f"{linear}.bias", tensor
            case [linear, "A" | "B" as factor, "weight"]:
                if linear not in waiting:
                    waiting[linear] = tensor
                    continue
                pair = tensor, waiting.pop(linear)
                down, up = pair if factor == "A" else reversed(pair)
                weight = _product(up, down).to(dtype)
                if finite_check and not weight.isfinite().all():
                    raise CheckpointError(
                        f"{linear}: the product of its factors is too large for {dtype}; serve "
                        "with --dtype bfloat16, or without merge_factors"
                    )
                yield f"{linear}.weight", weight
            case _:
                yield name, tensor


def _product(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """B @ A, fp32 [out, in], on the device of this process."""
    device = current_platform.device_type
    return up.to(device).float() @ down.to(device).float()

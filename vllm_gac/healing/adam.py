"""Adam (Kingma and Ba, ICLR 2015), whose moments may be offloaded to the CPU.

There they take no memory of the GPU, and travel to it and back in each step. The numbers that come
out are the same: torch's fused step treats each number by itself. torch.optim's classes are not
used, because they keep their state beside the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

Tensor = torch.Tensor
# As language models are trained. There is no weight decay: it would pull towards zero what the
# dense model's weights have made large.
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
# Numbers that travel at once. Pinned memory is given out in powers of two.
_PIECE = 1 << 22
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice of a parameter, flat, and the moving averages of its gradient and its square."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Adam:
    """The optimizer of some parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], offload: bool) -> None:
        """Begin with no moments.

        Args:
            parameters: Tensors outside of the autograd graph, by their names.
            offload: Whether the moments lie in host memory.
        """
        self._offload = offload
        self._steps = 0
        self._pieces = {
            name: [self._piece(flat) for flat in self._slices(parameter)]
            for name, parameter in parameters.items()
        }

    def _slices(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.view(-1)
        return list(torch.split(flat, _PIECE)) if self._offload else [flat]

    def _piece(self, flat: Tensor) -> _Piece:
        if not self._offload:
            return _Piece(flat, torch.zeros_like(flat), torch.zeros_like(flat))
        pinned = flat.device.type == "cuda"
        moments = (torch.zeros(len(flat), pin_memory=pinned) for _ in MOMENTS)
        return _Piece(flat, *moments)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Take a step along the gradients of all parameters, at a learning rate."""
        pairs = [
            (piece, gradient)
            for name, pieces in self._pieces.items()
            for piece, gradient in zip(pieces, self._slices(gradients[name]), strict=True)
            if len(gradient)
        ]
        # One by one if they travel, else all at once.
        for some in [[pair] for pair in pairs] if self._offload else [pairs]:
            device = some[0][1].device
            there = [[a.to(device, non_blocking=True) for a in _moments(p)] for p, _ in some]
            adamw(
                [piece.parameter for piece, _ in some],
                [gradient for _, gradient in some],
                [exp_avg for exp_avg, _ in there],
                [exp_avg_sq for _, exp_avg_sq in there],
                [],
                list(torch.full((len(some),), float(self._steps), device=device).unbind()),
                fused=True,
                amsgrad=False,
                beta1=_BETAS[0],
                beta2=_BETAS[1],
                lr=rate,
                weight_decay=0.0,
                eps=_EPSILON,
                maximize=False,
            )
            for (piece, _), changed in zip(some, there, strict=True):
                for kept, tensor in zip(_moments(piece), changed, strict=True):
                    if kept is not tensor:
                        kept.copy_(tensor, non_blocking=True)
        if self._offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # the moments have arrived
        self._steps += 1

    def forget(self) -> None:
        """Begin again with no moments."""
        self._steps = 0
        for pieces in self._pieces.values():
            for piece in pieces:
                for moment in _moments(piece):
                    moment.zero_()

    def moments(self, kind: str, name: str) -> Tensor:
        """A moment of a parameter, flat: one of the MOMENTS."""
        parts = [_moments(piece)[MOMENTS.index(kind)] for piece in self._pieces[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def restore(self, kind: str, name: str, moment: Tensor, steps: int) -> None:
        """Take up a moment of a parameter again, which so many `steps` have made."""
        self._steps = steps
        for piece, values in zip(self._pieces[name], self._slices(moment), strict=True):
            _moments(piece)[MOMENTS.index(kind)].copy_(values)


def _moments(piece: _Piece) -> tuple[Tensor, Tensor]:
    return piece.exp_avg, piece.exp_avg_sq

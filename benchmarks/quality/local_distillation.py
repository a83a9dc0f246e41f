"""Healing layer by layer: each compressed layer is fitted to what the dense layer gives.

This is the block-wise local distillation of Puzzle (Bercovich et al., 2024), which NVIDIA's
Puzzletron begins with, in the loop of `vllm-gac heal`: only what is minimized differs. The held-out
text is measured as always, so the best weights are those whose predictions diverge least.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from vllm_gac.healing.distillation import Distillation, _activation_checkpoint, _embedded
from vllm_gac.steps import heal as step

Tensor = torch.Tensor


class OnDenseInputs(Distillation):
    """A student whose layers each see what the dense model's layers before them give."""

    __slots__ = ()
    dense_inputs = True

    def _loss(self, tokens: Tensor) -> Tensor:
        layers = range(len(self.student.reference.layout.layers))
        with self._precision():
            dense, student = (_embedded(model, tokens) for model in (self.teacher, self.student))
            total = torch.zeros((), device=student.device)
            for index in layers:
                theirs, ours = (m.weights.layers[index] for m in (self.teacher, self.student))
                entering = dense if self.dense_inputs else student.detach()
                with torch.no_grad():
                    dense = theirs(self._layer, self.teacher, index, dense)
                student, distance = ours(
                    _activation_checkpoint, self._student_layer, index, entering, dense
                )
                total = total + distance
        # The norm after the last layer is trained, too; here it gets a gradient of zeros.
        return total + 0 * self.student.weights.tensor("model.norm.weight").sum()


class OnCompressedInputs(OnDenseInputs):
    """A student whose layers each see what its own layers before them give."""

    __slots__ = ()
    dense_inputs = False


@contextmanager
def minimizing(distillation: type[Distillation]) -> Iterator[None]:
    """Within the context, `heal` minimizes this distance."""
    with patch.object(step, "Distillation", distillation):
        yield

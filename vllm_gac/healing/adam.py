"""Adam (Kingma and Ba, ICLR 2015).

torch.optim's classes are not used, because they keep their state beside the parameters.
"""

from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw

Tensor = torch.Tensor
# As language models are trained. There is no weight decay: it would pull towards zero what the
# dense model's weights have made large.
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


class Adam:
    """The optimizer of some parameters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin with no moments.

        Args:
            parameters: Tensors outside of the autograd graph, by their names.
        """
        self._steps = 0
        self._parameters = dict(parameters)
        self._moments = {
            kind: {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
            for kind in MOMENTS
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Take a step along the gradients of all parameters, at a learning rate."""
        names = [name for name, parameter in self._parameters.items() if len(parameter)]
        exp_avgs, exp_avg_sqs = ([self._moments[kind][n] for n in names] for kind in MOMENTS)
        device = gradients[names[0]].device
        adamw(
            [self._parameters[name] for name in names],
            [gradients[name] for name in names],
            exp_avgs,
            exp_avg_sqs,
            [],
            list(torch.full((len(names),), float(self._steps), device=device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=rate,
            weight_decay=0.0,
            eps=_EPSILON,
            maximize=False,
        )
        self._steps += 1

    def forget(self) -> None:
        """Begin again with no moments."""
        self._steps = 0
        for moments in self._moments.values():
            for moment in moments.values():
                moment.zero_()

    def moments(self, kind: str, name: str) -> Tensor:
        """A moment of a parameter: one of the MOMENTS."""
        return self._moments[kind][name]

    def restore(self, kind: str, name: str, moment: Tensor, steps: int) -> None:
        """Take up a moment of a parameter again, which so many `steps` have made."""
        self._steps = steps
        own = self._moments[kind][name]
        own.copy_(moment.view_as(own))

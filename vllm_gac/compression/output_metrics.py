"""The metrics of linear layers' outputs: how much the loss grows if an output is wrong.

If the output of a linear is wrong by e, the model's predictions diverge by about 1/2 e^T G e nats,
where G = E[g g^T] is the second moment of the gradient of the loss by the output, for next tokens
that are drawn from the model's own predictions (the Fisher information). Together with the
covariance of the input it is K-FAC's curvature of the linear's weights (Martens and Grosse,
"Optimizing Neural Networks with Kronecker-factored Approximate Curvature", ICML 2015).

The metric is G [out, out]. Of gate_proj and up_proj it is W^T G W [in, in], because a truncation
needs no more of it and a wide MLP would make G large.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from vllm_gac.compression.backward import Keep, Stopped, backward
from vllm_gac.compression.methods.statistics import metric_of, of_input
from vllm_gac.compression.moments import second_moment, shrunk
from vllm_gac.compression.reference_model import Reference, batches, layer_forward


def measure_output_metrics(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    linears: Sequence[str],
    keep: Keep,
    *,
    stopped: Stopped | None = None,
    progress: bool = False,
) -> None:
    """Measure the metrics of `linears` in every layer, and pass them on.

    Args:
        model: The dense model.
        read: Reads its tensors.
        tokens: Token ids [count, length], with a length of at least 2.
        linears: The names of the linears, e.g. "mlp.up_proj".
        keep: What is measured are metrics by `metric_of`, fp64 on the model's device.
        stopped: Where a pass to go on with was stopped.
        progress: Whether to show a progress bar on stderr.
    """

    def through(
        index: int,
        weights: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        incoming: torch.Tensor,
    ) -> torch.Tensor:
        outgoing, metrics = _backward(model, index, weights, hidden, incoming[0], linears)
        keep(index, {metric_of(name): metric for name, metric in metrics.items()}, outgoing[None])
        return outgoing[None]

    backward(model, read, tokens, through, beside=1, stopped=stopped, progress=progress)


def _backward(
    model: Reference,
    index: int,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    incoming: torch.Tensor,
    linears: Sequence[str],
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The gradient by the layer's input, and the metrics of its linear layers."""
    outgoing: list[torch.Tensor] = []
    sums: dict[str, torch.Tensor] = {}
    for states, gradient in zip(batches(hidden), batches(incoming), strict=True):
        outputs: dict[str, torch.Tensor] = {}
        entering = states.to(model.device).requires_grad_()
        left = layer_forward(
            model,
            model.layout.layers[index],
            weights,
            entering,
            observe_output=outputs.__setitem__,
        )
        wanted = [entering, *(outputs[name] for name in linears)]
        first, *by_linear = torch.autograd.grad(left, wanted, gradient.to(model.device))
        outgoing.append(first.to(hidden.device))
        for name, by_output in zip(linears, by_linear, strict=True):
            # The last token predicts nothing: its gradient is zero.
            rows = by_output[:, :-1].flatten(0, 1)
            if of_input(name):
                rows = rows @ weights[f"{name}.weight"]
            sums[name] = sums.get(name, 0) + second_moment(rows).double()
    count = hidden.shape[0] * (hidden.shape[1] - 1)
    metrics = {}
    for name, total in sums.items():
        weight = weights[f"{name}.weight"].double()
        target = weight.T @ weight if of_input(name) else None
        metrics[name] = shrunk(total / count, count, target)
    return torch.cat(outgoing), metrics

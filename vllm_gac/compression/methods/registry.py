"""The methods that there are, by the names of `--method`, in the order of their use.

Reading the names imports no method, and so no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm_gac.compression.methods.base import MeasuredLayer, Method
    from vllm_gac.layout.dims import LayerLayout


def _heads() -> "Method":
    from vllm_gac.compression.methods.heads.method import Heads

    return Heads()


def _prune() -> "Method":
    from vllm_gac.compression.methods.prune import Prune

    return Prune()


def _lowrank() -> "Method":
    from vllm_gac.compression.methods.lowrank import LowRank

    return LowRank()


@dataclass(frozen=True, slots=True)
class Entry:
    """A method in the registry.

    Attributes:
        load: Imports it.
        help: What `--help` says it makes.
        usual: Whether a plan that names no method and has no loss to keep to uses it.
    """

    load: "Callable[[], Method]"
    help: str
    usual: bool = False


# In the order of use. What refines the candidates of other methods, and replaces whole linears by
# factors, comes last.
METHODS: dict[str, Entry] = {
    "heads": Entry(_heads, "merged and smaller key and value heads", usual=True),
    "prune": Entry(_prune, "narrower MLPs", usual=True),
    "lowrank": Entry(_lowrank, "factorized linears"),
}


def methods_of(names: Iterable[str]) -> "Iterator[Method]":
    """The methods of these names, in the order of the registry."""
    named = {*names}
    return (entry.load() for name, entry in METHODS.items() if name in named)


def compress_layer(layer: "MeasuredLayer", target: "LayerLayout") -> "dict[str, torch.Tensor]":
    """The tensors of a layer with the dims of `target`, by their names within the layer.

    Tensors that do not shrink are returned unchanged. The others are fp64, and RoPE tables fp32.
    Raises PlanError if no method makes `target` from the dense layer.
    """
    dense = layer.layout
    for method in methods_of(METHODS):
        for compressor in method.making(dense, target):
            layer = compressor.compress(layer, target)
    return dict(layer.weights)


def usual_methods() -> tuple[str, ...]:
    """The names of the methods of a plan that names none and has no loss to keep to."""
    return tuple(name for name, entry in METHODS.items() if entry.usual)


def owner_of(curve: str) -> "Method":
    """The method that a curve of errors or losses belongs to, by its name.

    Raises ValueError if there is none, so that nothing says what its errors cost.
    """
    methods = [*methods_of(METHODS)]
    for method in methods:
        if curve.startswith(method.components):
            return method
    known = ", ".join(name for method in methods for name in method.components)
    raise ValueError(f"{curve}: begins with no component that has probes: {known}")


def component_of(curve: str) -> str:
    """The component of a layer, which has probes, that a curve belongs to; as `owner_of`."""
    return next(name for name in owner_of(curve).components if curve.startswith(name))


def methods_fault(kept: str | None, names: Iterable[str]) -> str | None:
    """The message if one of the methods `names` would change what is `kept`; or None.

    `kept` says why all of a model but its attention stays as it is, as `Checkpoint.kept` does.
    """
    if kept is None or all(method.keeps_mlp for method in methods_of(names)):
        return None
    suited = [name for name in METHODS for method in methods_of([name]) if method.keeps_mlp]
    return f"{kept}; give --method {','.join(suited)}"

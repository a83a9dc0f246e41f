"""What a compression method is: what it changes, what that loses, and the weights that it makes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_gac.layout.dims import LayerLayout, ModelLayout

# How many neighbouring key or value heads a method can merge into one.
MERGEABLE = (1, 2)

# [full + 1]: the loss at a dim of 0, 1, ..., full, in nats per token. The last one is 0.
Curve: TypeAlias = NDArray[np.float64]
# The beginning of linear layers' names, or several, as str.startswith takes them.
Prefix: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One decoder layer of a dense model, and its calibration statistics.

    Attributes:
        layout: The dense model's layout.
        weights: The layer's tensors by their names within the layer.
        covariances: fp64 covariances of the inputs of linear layers, and what else was measured
            (compression/statistics_file.py).
        inv_freq: The layer's RoPE frequencies, [head_dim / 2]; all 0 in one without RoPE.
        cache: What methods have computed of it and need for every dim, by their names.
    """

    layout: ModelLayout
    weights: Mapping[str, torch.Tensor]
    covariances: Mapping[str, torch.Tensor]
    inv_freq: torch.Tensor
    cache: dict[str, Any] = field(default_factory=dict, init=False, compare=False)

    def as_in_it(self, layer: LayerLayout) -> LayerLayout:
        """`layer`, a candidate for any layer of the model, with RoPE if this layer has it."""
        return replace(layer, has_rope=bool(self.inv_freq.any()))


class Compressor(Protocol):
    """What makes one dim of a layer smaller: a method has one or more."""

    @property
    def name(self) -> str:
        """The name of its curve of errors in statistics files; it begins with a component's."""

    @property
    def inputs(self) -> Sequence[str]:
        """The linear layers whose input covariances it needs."""

    @property
    def metrics(self) -> Sequence[str]:
        """The linear layers whose output metrics it needs."""

    def full(self, dense: ModelLayout) -> int:
        """The dim at which nothing is lost."""

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """fp64 [full + 1]: the squared error that is left at the dims 0, 1, ..., full.

        It decreases to 0. Its unit depends on the method; planning/losses.py relates it to the
        loss.
        """

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """`layer` with this dim as in `target`, in fp64, covariances included.

        Raises PlanError if it cannot make this dim.
        """


@dataclass(frozen=True, slots=True)
class Probe:
    """The dims of a layer in which one component is smaller.

    Of the first layers, some are `followed` through all layers behind (compression/probes.py).
    """

    component: str
    layer: LayerLayout
    followed: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a plan may choose for one part of a layer; the same in every layer.

    Attributes:
        prefix: The names of the part's linear layers begin with this, or with one of these.
        layers: Dense layers in which only this part is changed.
        fields: What of a layer belongs to the part, beside the ranks of its linear layers.
    """

    prefix: Prefix
    layers: Sequence[LayerLayout]
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a plan may choose from, as the planner knows it.

    Attributes:
        dense: The dense model.
        key_form: The form of the keys: rotary, latent, or auto for both.
        key_group: How many key heads become one; None: any number.
        value_group: How many value heads become one; None: any number.
        tensor_parallel_size: The GPUs that the model is split over.
        together: The linear layers that are chosen together where no half of a layer is: one or
            more.
        up_to: From a full dim, its role and a number of heads to the allowed dims in rising order;
            the full, dense one is always among them.
        served: The layers whose attention our kernels can serve, or that have the dense one.
        fastest: Of layers that differ in the half that a prefix begins, in the order of rising
            dims, those that take less time than each with a larger dim.
    """

    dense: ModelLayout
    key_form: str
    key_group: int | None
    value_group: int | None
    tensor_parallel_size: int
    together: Sequence[Sequence[str]]
    up_to: Callable[..., Sequence[int]]
    served: Callable[[Iterable[LayerLayout]], list[LayerLayout]]
    fastest: Callable[[str, Sequence[LayerLayout]], list[LayerLayout]]


class Method(ABC):
    """What `--method` names: it changes fields of a layer, and says all that plans need of it.

    Adding one takes a module with a subclass, and an entry in registry.py.

    Attributes:
        fields: The fields of `LayerLayout` that it changes, and no other method does.
        components: What its probes are of. The names of its curves begin with one of them.
        keeps_mlp: Whether MLPs, and so the experts of a mixture, stay as they are.
        refines: Whether it adds to what other methods choose from, so that it has fewer candidates
            beside them. Plans by fewer methods are tried, too.
    """

    fields: ClassVar[tuple[str, ...]]
    components: ClassVar[tuple[str, ...]]
    keeps_mlp: ClassVar[bool] = False
    refines: ClassVar[bool] = False

    @abstractmethod
    def measured(self, dense: ModelLayout, value_group: int) -> Iterator[Compressor]:
        """The compressors whose errors calibration measures.

        Up to `value_group` value heads can be merged into one.
        """

    @abstractmethod
    def making(self, dense: ModelLayout, target: LayerLayout) -> Iterator[Compressor]:
        """The compressors that make what differs in `target`, in the order of their use.

        Raises PlanError if there are none.
        """

    @abstractmethod
    def curve_dims(self, dense: ModelLayout, layer: LayerLayout) -> Iterator[tuple[str, int]]:
        """The names of the curves of the dims of `layer` that it can change, and these dims."""

    @abstractmethod
    def probes(self, dense: ModelLayout) -> Iterator[Probe]:
        """The probes of any layer of `dense`, one for every component."""

    @abstractmethod
    def prior(self, dense: ModelLayout) -> dict[str, Curve]:
        """The curves of other models by name, for a model without statistics.

        They are of all layers together, if every layer has the same dim.
        """

    @abstractmethod
    def candidates(self, parts: Sequence[Candidates], choices: Choices) -> list[Candidates]:
        """The `parts` of the methods before, changed or not, and those of this one.

        Raises PlanError if there are none.
        """

    @abstractmethod
    def check(self, dense: ModelLayout, layer: LayerLayout, where: str) -> None:
        """Raise PlanError, which says `where`, unless it can make its fields of `layer`."""

    def with_fp8_cache(self, name: str, curve: Curve) -> Curve:
        """The curve `name` where keys and values are cached in FP8, of which rounding is a part."""
        return curve

    def value_group(self, dense: ModelLayout) -> int:
        """How many value heads it merges into one at most."""
        return 1

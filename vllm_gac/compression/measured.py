"""What calibration measures of a model: which statistics, for which methods, on how much text.

The metadata of stats.safetensors say it (statistics_file.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from vllm_gac.compression.methods.base import MERGEABLE, Compressor, Probe
from vllm_gac.compression.methods.registry import METHODS, methods_of
from vllm_gac.compression.methods.statistics import NORMED_KEYS, QUERY_ENERGY, metric_of, of_input
from vllm_gac.compression.moments import toward_diagonal
from vllm_gac.layout.dims import LINEARS, ModelLayout

# The fp64 covariance [n, n] of the input of each linear, by the linear's name. Beside them the
# metrics of outputs, by `metric_of`, and, of models with q_norm and k_norm, NORMED_KEYS and
# QUERY_ENERGY.
LayerStats: TypeAlias = Mapping[str, torch.Tensor]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

STATISTICS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
# The text that was fitted to, and the text that was set aside; and what probes lose on the latter.
TOKENS, HELD, PROBES = "tokens", "held", "probes"


@dataclass(frozen=True, slots=True)
class StatsSpec:
    """What a statistics file is to hold.

    Attributes:
        methods: The methods that may be planned with it.
        covariances: The linear layers whose input covariances [in, in] it keeps.
        metrics: The linear layers of which it keeps the metrics of the outputs.
        value_group: How many value heads may be merged into one at most.
    """

    methods: Sequence[str]
    covariances: Sequence[str]
    metrics: Sequence[str]
    value_group: int

    @classmethod
    def to_plan(cls, layout: ModelLayout, methods: Sequence[str]) -> "StatsSpec":
        """What plans of `methods` need, and compression by them, of a dense model of `layout`."""
        group = _value_group(layout, methods)
        return cls(methods, *needed_by(to_measure(layout, methods, group)), group)

    @classmethod
    def to_make(
        cls, target: ModelLayout, dense: ModelLayout, methods: Sequence[str]
    ) -> "StatsSpec":
        """What compression to `target` needs, by a plan of `methods`; nothing to choose by."""
        # Heads: the same sums as in a run that plans here itself, and so the same bytes.
        return cls((), *needed_by(making(dense, target)), _value_group(dense, methods))


@dataclass(frozen=True, slots=True)
class Measured:
    """What is measured.

    Attributes:
        methods: The methods that can be planned with it: heads, prune, lowrank.
        covariances: The linear layers whose input covariances are kept.
        metrics: The linear layers whose metrics are kept.
        value_group: How many neighbouring value heads the input of o_proj spans.
        tokens: Of the text that is fitted to.
        held_tokens: Of the text that is set aside. 0: none, as before format 4.
        sequence_length: Tokens of each sequence of both.
        probe_tokens: On how many tokens sensitivities are measured.
        metric_tokens: On how many metrics are.
        metadata: All that the file says.
    """

    methods: tuple[str, ...]
    covariances: tuple[str, ...]
    metrics: tuple[str, ...]
    value_group: int
    tokens: int
    held_tokens: int
    sequence_length: int
    probe_tokens: int
    metric_tokens: int
    metadata: Mapping[str, str]

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> "Measured":
        """What the metadata of a file say. Raises ValueError, which says what is wrong with it."""
        for key in ("methods", "value_group", "probe_tokens", "tokens", "sequence_length"):
            if key not in metadata:
                raise ValueError(f"{key}: missing")
        methods = tuple(method for method in metadata["methods"].split(",") if method)
        if not set(methods) <= set(METHODS):
            raise ValueError(
                f"methods: expected some of {','.join(METHODS)}, got {metadata['methods'][:60]!r}"
            )
        if metadata["value_group"] not in map(str, MERGEABLE):
            raise ValueError(
                f"value_group: expected one of {MERGEABLE}, got {metadata['value_group'][:60]!r}"
            )
        tokens, length = _count(metadata, "tokens"), _count(metadata, "sequence_length")
        if not length:
            raise ValueError("sequence_length: expected at least 1, got 0")
        if tokens < length:
            raise ValueError(f"tokens: expected one sequence of {length} at least, got {tokens}")
        held = _count(metadata, "held_tokens")
        if 0 < held < length:
            raise ValueError(f"held_tokens: expected one sequence of {length} at least, got {held}")
        covariances, metrics = (
            metadata.get(key, "").split(",") for key in ("covariances", "metrics")
        )
        return cls(
            methods=methods,
            covariances=tuple(name for name in STATISTICS if name in covariances),
            metrics=tuple(name for name in LINEARS if name in metrics),
            value_group=int(metadata["value_group"]),
            tokens=tokens,
            held_tokens=held,
            sequence_length=length,
            probe_tokens=_count(metadata, "probe_tokens"),
            metric_tokens=_count(metadata, "metric_tokens"),
            metadata=metadata,
        )

    def compressors(self, layout: ModelLayout) -> list[Compressor]:
        """The methods whose errors are measured, in a model of `layout`."""
        return to_measure(layout, self.methods, self.value_group)

    def shapes(self, layout: ModelLayout) -> Shapes:
        """The shape of every tensor of the file, in the order of the file."""
        layer = self._of_layer(layout)
        shapes: Shapes = {
            f"layers.{index}.{name}": shape
            for index in range(len(layout.layers))
            for name, shape in layer.items()
        }
        return shapes | self.whole_model_shapes(layout)

    def whole_model_shapes(self, layout: ModelLayout) -> Shapes:
        """The shape of every tensor that is not of one layer."""
        length = self.sequence_length
        text: Shapes = {TOKENS: (self.tokens // length, length)}
        if self.held_tokens:
            return text | {HELD: (self.held_tokens // length, length)}
        tried: Shapes = {PROBES: (len(layout.layers), 2 * len(probes(layout, self.methods)), 2)}
        return tried | text

    def covariance_sizes(self, layout: ModelLayout) -> list[int]:
        """n of each covariance [n, n] of a layer."""
        shapes = layer_shapes(layout, self.value_group)
        return [shapes[name][0] for name in self.covariances]

    def metric_sizes(self, layout: ModelLayout) -> list[int]:
        """n of each metric [n, n] of a layer."""
        shapes = metric_shapes(layout)
        return [shapes[name][0] for name in self.metrics]

    def _of_layer(self, layout: ModelLayout) -> Shapes:
        packed = [(n * (n + 1) // 2,) for n in self.covariance_sizes(layout)]
        shapes: Shapes = dict(zip(self.covariances, packed, strict=True))
        if layout.qk_norm:
            keys = layout.num_key_value_heads * layout.head_dim
            shapes[NORMED_KEYS] = (keys * (keys + 1) // 2,)
            shapes[QUERY_ENERGY] = (keys // 2,)
        packed = [(n * (n + 1) // 2,) for n in self.metric_sizes(layout)]
        shapes |= zip(map(metric_of, self.metrics), packed, strict=True)
        shapes |= {f"errors.{c.name}": (c.full(layout) + 1,) for c in self.compressors(layout)}
        if self.held_tokens and self.probe_tokens:
            count = self.probe_tokens // self.sequence_length
            shapes[PROBES] = (len(probes(layout, self.methods)), count)
        return shapes


def _count(metadata: Mapping[str, str], key: str) -> int:
    number = metadata.get(key, "0")
    if not (number.isascii() and number.isdigit() and len(number) < 20):
        raise ValueError(f"{key}: expected a number, got {number[:60]!r}")
    return int(number)


def layer_shapes(layout: ModelLayout, value_group: int) -> dict[str, tuple[int, int]]:
    """The shape of each covariance of a layer of a dense model."""
    attended = layout.num_attention_heads * value_group * layout.head_dim
    width = layout.layers[0].intermediate_size
    projected = layout.hidden_size + layout.qkv_bias
    sizes = (projected, attended, layout.hidden_size, width)
    return {name: (size, size) for name, size in zip(STATISTICS, sizes, strict=True)}


def to_measure(dense: ModelLayout, methods: Sequence[str], value_group: int) -> list[Compressor]:
    """What `methods` have calibration measure of a dense model.

    Up to `value_group` value heads can be merged into one.
    """
    return [c for method in methods_of(methods) for c in method.measured(dense, value_group)]


def making(dense: ModelLayout, target: ModelLayout) -> list[Compressor]:
    """What makes `target` of a dense model; some of it several times."""
    methods = [*methods_of(METHODS)]
    return [c for layer in target.layers for method in methods for c in method.making(dense, layer)]


def _value_group(dense: ModelLayout, methods: Sequence[str]) -> int:
    """How many value heads `methods` may merge into one at most."""
    return max((method.value_group(dense) for method in methods_of(methods)), default=1)


def probes(dense: ModelLayout, methods: Sequence[str]) -> list[Probe]:
    """The probes (probes.py) of any layer of `dense`, one for every part."""
    return [probe for method in methods_of(methods) for probe in method.probes(dense)]


def needed_by(used: Iterable[Compressor]) -> tuple[list[str], list[str]]:
    """The linear layers whose input covariances these need, and those whose metrics they need."""
    used = [*used]
    inputs = {name for compressor in used for name in compressor.inputs}
    metrics = {name for compressor in used for name in compressor.metrics}
    return [n for n in STATISTICS if n in inputs], [n for n in LINEARS if n in metrics]


def metric_shapes(layout: ModelLayout) -> dict[str, tuple[int, int]]:
    """The shape of the metric of each linear of a dense model."""
    sizes = {}
    for name in LINEARS:
        out, into = layout.linear_shape(layout.layers[0], name)
        sizes[name] = into if of_input(name) else out
    return {name: (size, size) for name, size in sizes.items()}


def shrink_covariances(stats: LayerStats, tokens: int) -> LayerStats:
    """Statistics of a layer, measured on so many `tokens`, as methods use them.

    Covariances are shrunk (`toward_diagonal`): the more, the fewer tokens there are.
    """
    return {
        name: toward_diagonal(matrix, tokens) if name in STATISTICS else matrix
        for name, matrix in stats.items()
    }

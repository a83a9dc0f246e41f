"""Run calibration text through a dense model, layer by layer, and keep what the methods need.

If linear layers may be factorized, a first pass over fewer tokens measures what errors of their
outputs cost (output_metrics.py). If plans are to be made, another pass keeps gradients by the
output of each layer for text that was set aside (probes.py). In the pass that measures everything
else, memory holds the weights and statistics of one layer, and the hidden states of the calibration
sequences. While a layer is computed, a thread writes the statistics of the layer before it and what
its probes lose. From time to time each pass keeps the hidden states or gradients between two
layers, so that a run that was stopped continues there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from time import monotonic

import torch
from torch.nn.functional import pad, rms_norm
from tqdm import tqdm

from vllm_gac.checkpoint.atomic_files import write_floats, write_tensors
from vllm_gac.checkpoint.headers import open_safetensors
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.backward import entering_states
from vllm_gac.compression.measured import (
    HELD,
    PROBES,
    STATISTICS,
    TOKENS,
    LayerStats,
    Measured,
    layer_shapes,
    metric_shapes,
    probes,
    shrink_covariances,
)
from vllm_gac.compression.methods.base import MeasuredLayer, Probe
from vllm_gac.compression.methods.statistics import (
    NORMED_KEYS,
    QUERY_ENERGY,
    metric_of,
    own_columns,
)
from vllm_gac.compression.moments import clip_weights, second_moment, size_limit
from vllm_gac.compression.output_metrics import measure_output_metrics
from vllm_gac.compression.probes import (
    DRAWS,
    followed,
    measure_followed,
    measure_gradients,
    measure_layer,
    positions,
)
from vllm_gac.compression.reference_model import (
    Reference,
    after_mlp,
    attended_values,
    batches,
    embed_all,
    layer_outputs,
    layer_weights,
    project,
    reference,
)
from vllm_gac.compression.statistics_file import StatsFile
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LayerLayout, ValueLayout
from vllm_gac.texts.token_text import evenly_spread

# What is kept of a pass for its continuation is large: a stop may cost so much work, and a layer.
_KEEP_SECONDS = 20.0
# Of the tokens that probes run on, how many run through the layers behind one, too.
_FOLLOWED_TOKENS = 1 << 13
_MIN_LOSS = 1e-12
# The kinds of files (`_path`).
_KEPT = ("hidden", "metrics", "gradients", "metrics-by-input", "gradients-by-input")


def measure_statistics(
    checkpoint: Checkpoint,
    tokens: torch.Tensor,
    held: torch.Tensor,
    file: StatsFile,
    measured: Measured,
    device: str,
    home: str,
    progress: bool,
) -> None:
    """Run text through a dense model, and fill a file of statistics.

    Args:
        checkpoint: The dense model.
        tokens: The text to fit to, [sequences, length].
        held: The text that was set aside, [sequences, length].
        file: Where the statistics go; what it has already is not measured again. Files beside it
            keep what the next layer needs.
        measured: What is measured.
        device: The torch device to compute on.
        home: The torch device to keep hidden states on, and weights if it is a GPU.
        progress: Whether to show progress bars on stderr.
    """
    if not file.begun:
        _remove(file, range(len(checkpoint.layout.layers) + 1), *_KEPT)
        file.start()
    with checkpoint.reader() as read_file:
        # Five passes read the weights.
        read = read_file if home == "cpu" else cache(lambda name: read_file(name).to(home))
        model = reference(checkpoint, device=device, home=home)
        run = _Run(model, read, tokens, held, file, measured, progress)
        _measure_metrics(run)
        _measure_gradients(run)
        _stream(run)
        file.finish({TOKENS: tokens, HELD: held})


@dataclass(frozen=True, slots=True)
class _Run:
    """What each pass over the model needs."""

    model: Reference
    read: Callable[[str], torch.Tensor]
    tokens: torch.Tensor  # [sequences, length]
    held: torch.Tensor
    file: StatsFile
    measured: Measured
    progress: bool

    @property
    def probed(self) -> torch.Tensor:
        """The text that probes run on."""
        return self.held[: self.measured.probe_tokens // self.held.shape[1]]

    @property
    def some(self) -> list[int]:
        """The numbers of its sequences that run through the layers behind a probe, too."""
        most = max(1, _FOLLOWED_TOKENS // self.held.shape[1])
        return evenly_spread(min(most, len(self.probed)), len(self.probed))


@dataclass(slots=True)
class _Pause:
    """Whether what a pass needs to go on after a stop is to be kept again."""

    since: float = field(default_factory=monotonic)

    def over(self) -> bool:
        """Whether it was long enough, so that the next pause begins."""
        if monotonic() - self.since < _KEEP_SECONDS:
            return False
        self.since = monotonic()
        return True


def _measure_metrics(run: _Run) -> None:
    """Write the metrics of every layer that is not on disk yet to a file of its own."""
    if linears := run.measured.metrics:
        count = run.measured.metric_tokens // run.tokens.shape[1]
        some = run.tokens[evenly_spread(count, len(run.tokens))]
        _back(run, "metrics", some, 1, measure_output_metrics, linears)


def _measure_gradients(run: _Run) -> None:
    """Write the gradients that probes need of every layer that is not on disk yet."""
    if len(run.probed):
        _back(run, "gradients", run.probed, DRAWS, measure_gradients)


def _back(
    run: _Run,
    what: str,
    tokens: torch.Tensor,
    draws: int,
    measure: Callable[..., None],
    *arguments: object,
) -> None:
    """Have a backward pass over `tokens` [count, length] `measure` what is not on disk yet."""
    file, layers, pause = run.file, len(run.model.layout.layers), _Pause()
    if all(_path(file, what, index).exists() for index in range(file.whole_layers(), layers)):
        return
    by_input, stopped = f"{what}-by-input", None
    for left in reversed(range(1, layers)):
        if (path := _path(file, by_input, left)).exists():
            expected = {by_input: (draws, *tokens.shape, run.model.layout.hidden_size)}
            stopped = left, kept_tensors(path, expected)[by_input].to(run.model.home)

    def keep(index: int, tensors: Mapping[str, torch.Tensor], entering: torch.Tensor) -> None:
        stored = {name: tensor.to("cpu", torch.float32) for name, tensor in tensors.items()}
        write_tensors(_path(file, what, index), stored)
        if index and pause.over():
            write_floats(_path(file, by_input, index), {by_input: entering.shape}, [entering], {})
            _remove(file, range(index + 1, layers), by_input)

    options = {"keep": keep, "stopped": stopped, "progress": run.progress}
    measure(run.model, run.read, tokens, *arguments, **options)
    _remove(file, range(layers), by_input)


def _stream(run: _Run) -> None:
    """For every layer not on disk yet: observe it, append its statistics, pass its output on."""
    file, measured, model, read = run.file, run.measured, run.model, run.read
    layers, compressors = len(model.layout.layers), measured.compressors(model.layout)
    tried = probes(model.layout, measured.methods)
    # 0 if there are none.
    done = max(
        i for i in range(file.whole_layers() + 1) if not i or _path(file, "hidden", i).exists()
    )
    written: Future[None] | None = None
    pause = _Pause()
    with torch.inference_mode(), ThreadPoolExecutor(1) as writer:
        if done:
            size = model.layout.hidden_size
            shapes = {"hidden": (*run.tokens.shape, size), "held": (*run.probed.shape, size)}
            kept = kept_tensors(_path(file, "hidden", done), shapes)
            hidden, held = (states.to(model.home) for states in kept.values())
        else:
            hidden, held = (
                states.to(model.home) for states in embed_all(model, read, (run.tokens, run.probed))
            )
        some = run.some
        follows = [len(followed(model.layout, tried, index)) for index in range(layers)]
        # In passes of a sequence through a layer. What else is done with a layer takes about as
        # long as its own.
        passes = [
            2 * (len(run.tokens) + len(held)) + len(some) * follows[index] * (layers - index)
            for index in range(layers)
        ]
        first = len(some) * layers if any(follows[done:]) else 0
        with tqdm(
            total=first + sum(passes[done:]),
            desc="calibrate",
            smoothing=0,
            disable=not run.progress,
        ) as bar:
            last = None
            if first:
                # Those of the other layers are not kept.
                last = entering_states(
                    model, read, run.probed[some], advance=lambda: bar.update(len(some))
                )[-1]
            for index in range(done, layers):
                weights = layer_weights(model, read, index)
                stats, hidden = observe_layer(
                    model, index, weights, hidden, measured.value_group, measured.covariances
                )
                stats = {**stats, **_read_metrics(run, index, measured.metrics)}
                steady = shrink_covariances(stats, measured.tokens)
                frequencies = model.inv_freq * model.layout.layers[index].has_rope
                layer = MeasuredLayer(model.layout, weights, steady, frequencies)
                errors = {f"errors.{c.name}": c.errors(layer) for c in compressors}
                if len(held):
                    lost = _probed(run, index, layer, tried, held)
                    _scale_followed(lost, run, index, layer, tried, held, last)
                    errors[PROBES] = lost.flatten()
                    held = layer_outputs(model, model.layout.layers[index], weights, held)
                bar.update(passes[index])
                if written is not None:
                    written.result()
                states = {"hidden": hidden, "held": held} if pause.over() else {}
                written = writer.submit(_write_layer, file, index, {**stats, **errors}, states)
        if written is not None:
            written.result()


def _write_layer(
    file: StatsFile, index: int, stats: LayerStats, leaving: Mapping[str, torch.Tensor]
) -> None:
    """Write what was measured of layer `index`, and the hidden states that leave it, if any."""
    file.append(index, stats)
    if leaving:
        shapes = {name: states.shape for name, states in leaving.items()}
        write_floats(_path(file, "hidden", index + 1), shapes, leaving.values(), {})
        _remove(file, range(index + 1), "hidden", "metrics", "gradients")


def _probed(
    run: _Run, index: int, layer: MeasuredLayer, tried: Sequence[Probe], held: torch.Tensor
) -> torch.Tensor:
    """What the probes of layer `index` lose by the quadratic form, [probes, sequences]."""
    count, length, size = held.shape
    shape = (DRAWS, count, len(positions(length)), size)
    gradients = kept_tensors(_path(run.file, "gradients", index), {"gradients": shape})["gradients"]
    gradients = gradients.to(held.device)
    return measure_layer(run.model, layer, tried, held, gradients)


def _scale_followed(
    lost: torch.Tensor,
    run: _Run,
    index: int,
    layer: MeasuredLayer,
    tried: Sequence[Probe],
    held: torch.Tensor,
    last: torch.Tensor | None,
) -> None:
    """Scale up what followed probes of layer `index` have `lost`, where the model loses more."""
    for number in followed(run.model.layout, tried, index):
        assert last is not None  # some probe is followed
        target, some = tried[number].layer, run.some
        really = measure_followed(run.model, run.read, index, layer, target, held[some], last)
        lost[number] *= max(1.0, really / max(_MIN_LOSS, float(lost[number, some].mean())))


def _read_metrics(run: _Run, index: int, linears: Sequence[str]) -> dict[str, torch.Tensor]:
    """The metrics of `linears` in layer `index` by `metric_of`, fp64."""
    if not linears:
        return {}
    shapes = metric_shapes(run.model.layout)
    expected = {metric_of(name): shapes[name] for name in linears}
    stored = kept_tensors(_path(run.file, "metrics", index), expected)
    return {name: tensor.to(run.model.device, torch.float64) for name, tensor in stored.items()}


def kept_tensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    """Read what a stopped pass has kept: tensors of these shapes.

    Raises CheckpointError if the file is missing, broken, or has other tensors.
    """
    with open_safetensors(path, "what the stopped run kept; remove it and resume", "pt") as file:
        stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        expected = {name: list(shape) for name, shape in shapes.items()}
        if stored != expected:
            raise CheckpointError(
                f"{path}: not what the stopped run kept: has {stored}, expected {expected}; remove "
                "it and resume"
            )
        return {name: file.get_tensor(name) for name in shapes}


def _path(file: StatsFile, what: str, layer: int) -> Path:
    """A file that is kept until the statistics of `layer` are written.

    It has the metrics of the layer, the gradients by some of what leaves it, the hidden states that
    enter it, or all gradients by these, which the pass of the metrics or of the gradients goes on
    with.
    """
    return file.path.with_name(f"{what}-{layer:04}.safetensors")


def _remove(file: StatsFile, layers: Iterable[int], *kinds: str) -> None:
    for what, layer in product(kinds, layers):
        _path(file, what, layer).unlink(missing_ok=True)


def observe_layer(
    model: Reference,
    index: int,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    value_group: int = 1,
    linears: Sequence[str] = STATISTICS,
) -> tuple[LayerStats, torch.Tensor]:
    """Mean covariances of the inputs of a dense layer's `linears`, and the layer's output.

    Args:
        model: The dense model.
        index: The number of the layer.
        weights: The layer's tensors, as `layer_weights` returns them.
        hidden: The hidden states that enter the layer, [count, length, hidden].
        value_group: How many value heads the input of o_proj spans.
        linears: The linears whose input covariances are wanted.

    Returns:
        The covariances [in, in] by linear, or [in + 1, in + 1] where its bias counts as a column,
        the statistics of normed heads, and the output [count, length, hidden]. Products are
        computed in the model's dtype and summed in fp64. Tokens of massive activations are limited
        (moments.py: clip_weights).
    """
    layer, own = _grouped_values(model, index, value_group)
    sums = {
        name: torch.zeros(shape, dtype=torch.float64, device=model.device)
        for name, shape in layer_shapes(model.layout, value_group).items()
        if name in linears
    }

    limits: dict[str, torch.Tensor] = {}  # by the first batch

    def observe(name: str, x: torch.Tensor) -> None:
        if name not in sums:
            return
        rows = x.flatten(0, 1)
        if name not in limits:
            limits[name] = size_limit(rows)
        share = clip_weights(rows, limits[name])
        if len(sums[name]) > rows.shape[1]:
            rows = pad(rows, (0, 1), value=1)  # what biases are multiplied by
        rows = share * rows
        sums[name] += second_moment(rows)

    kv_heads, head_dim = model.layout.num_key_value_heads, model.layout.head_dim
    if model.layout.qk_norm:
        shapes = {NORMED_KEYS: (kv_heads * head_dim,) * 2, QUERY_ENERGY: (kv_heads, head_dim // 2)}
        for name, shape in shapes.items():
            sums[name] = torch.zeros(shape, dtype=torch.float64, device=model.device)

    def observe_heads(name: str, x: torch.Tensor) -> None:
        if not model.layout.qk_norm:
            return
        if name == "self_attn.k_proj":
            keys = x.reshape(-1, kv_heads, head_dim)
            rows = rms_norm(keys, (head_dim,), eps=model.eps).flatten(1)
            sums[NORMED_KEYS] += second_moment(rows)
        if name == "self_attn.q_norm":
            pairs = x.reshape(-1, kv_heads, layer.query_heads // kv_heads, 2, head_dim // 2)
            sums[QUERY_ENERGY] += pairs.square().sum((2, 3)).sum(0, dtype=torch.float64)

    outputs = torch.empty_like(hidden)
    for batch, leaving in zip(batches(hidden), batches(outputs), strict=True):
        states = batch.to(model.device)
        read = attended_values(model, layer, weights, states, observe, observe_heads)
        states = states + project(weights, "self_attn.o_proj", read[..., own], observe_heads)
        leaving.copy_(after_mlp(model, weights, states, observe, observe_heads))
    count = hidden.shape[0] * hidden.shape[1]
    stats = {name: total / count for name, total in sums.items()}
    if model.layout.qk_norm:
        stats[QUERY_ENERGY] = stats[QUERY_ENERGY].flatten()
    return stats, outputs


def _grouped_values(
    model: Reference, index: int, group: int
) -> tuple[LayerLayout, torch.Tensor | slice]:
    """Dense layer `index` with value heads of `group` times the size, and what o_proj then takes.

    Each query head then also reads the values of the neighbouring value heads, by which merged
    value heads are chosen.
    """
    layout, layer = model.layout, model.layout.layers[index]
    if group == 1:
        return layer, slice(None)
    wide = ValueLayout(layer.value.heads // group, layer.value.size * group)
    own = own_columns(layout.num_attention_heads, layer.value.heads, layout.head_dim, group)
    return replace(layer, value=wide), own.to(model.device)

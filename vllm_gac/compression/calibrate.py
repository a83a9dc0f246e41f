"""Run calibration text through a dense model, layer by layer, and keep what the methods need.

If linears may be factorized, a first pass over fewer tokens measures what errors of their outputs
cost (output_metrics.py). In the pass that measures everything else, memory holds the weights and
statistics of one layer, and the hidden states of the calibration sequences. After each layer its
statistics and the hidden states are on disk, so that a run that was stopped continues with the next
layer. A third pass measures by how much the loss grows if a part of a layer shrinks (probes.py).
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import pad
from tqdm import tqdm

from vllm_gac.checkpoint.atomic_files import write_tensors
from vllm_gac.checkpoint.dense_model import open_dense
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.kept_tensors import kept_tensors
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.token_text import calibration_sequences, evenly_spread
from vllm_gac.checkpoint.workspace import (
    claimed,
    finished_before,
    partial_of,
    publish,
    refuse_existing,
)
from vllm_gac.compression.arguments import check_count, check_names
from vllm_gac.compression.devices import check_device
from vllm_gac.compression.effort import Work, announcement
from vllm_gac.compression.methods.attended import spread_output
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.normed_keys import PAIR_SCORES, normed_pair_scores
from vllm_gac.compression.methods.output_metric import metric_of
from vllm_gac.compression.outliers import shares, size_limit
from vllm_gac.compression.output_metrics import measure_output_metrics
from vllm_gac.compression.probes import measure, probes
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed,
    layer_forward,
    layer_weights,
    reference,
)
from vllm_gac.compression.statistics_file import (
    FORMAT,
    STATISTICS,
    LayerStats,
    StatsFile,
    covariances_of,
    kept_covariances,
    kept_metrics,
    largest_value_group,
    layer_shapes,
    measured_methods,
    methods_of,
    metric_shapes,
    metrics_of,
    read_layer_stats,
    stats_file,
    steadied,
    whole_model_shapes,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout, ValueLayout
from vllm_gac.layout.schema import METHODS

logger = logging.getLogger(__name__)

# Tokens for each channel of an MLP. With 0.7 of the demo model's parameters and half its cache,
# the perplexity was 9.21 with 2.5 tokens, 8.53 with 9, 8.36 with 16, and 8.30 with all of the text.
ENOUGH, _FEW = 16, 8
_LEAST_TOKENS = 1 << 16
DEFAULT_SEQUENCE_LENGTH = 512
DEFAULT_PROBE_TOKENS = 1 << 11
# Tokens for the metrics of outputs.
_METRIC_TOKENS = 1 << 14


def calibrate(
    model: str | Path,
    texts: Sequence[str | Path],
    out: str | Path,
    *,
    revision: str | None = None,
    max_tokens: int | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    probe_tokens: int = DEFAULT_PROBE_TOKENS,
    methods: Sequence[str] = METHODS,
    linears: Sequence[str] | None = None,
    factorized: Sequence[str] | None = None,
    value_group: int | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> None:
    """Measure the statistics of a dense model on text, and write them to a file.

    Planning and compression read this file. Unfinished work is kept in `out`.partial, and the same
    call continues it.

    Args:
        model: Directory of a dense model, or its id on the Hub.
        texts: Text files, .jsonl or .parquet files with "text" or "messages" in each line, or data
            sets on the Hub: hf://datasets/ORGANIZATION/NAME.
        out: The safetensors file to write; it must not exist.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        max_tokens: How many tokens to use at most. None: 65,536, or 16 for each channel of an MLP
            if that is more.
        sequence_length: Tokens of one sequence; at most the model's context.
        probe_tokens: About how many of the tokens to measure sensitivities on, which plans need:
            by how many nats the loss grows if a part of a layer shrinks. 0: none.
        methods: The methods that may be planned with these statistics: heads, prune, lowrank.
        linears: The linears whose input covariances [in, in] are kept, e.g. "mlp.up_proj". None:
            all that `methods` need.
        factorized: The linears of which the metrics of the outputs are kept, so that they can be
            factorized. None: all if `methods` has lowrank, else none.
        value_group: How many value heads may be merged into one at most. None: as many as
            `methods` can merge.
        device: The torch device to compute on.
        progress: Whether to show a progress bar on stderr.

    Raises:
        CheckpointError: The model is not dense or of an unknown family, a method is unknown, the
            texts are too short, or `out` exists.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> vllm_gac.calibrate(
        ...     Path("llama"), [Path("text.txt")], Path("stats.safetensors"), max_tokens=512
        ... )
        >>> Path("stats.safetensors").exists()
        True
    """
    out = Path(out)
    check_device(device)
    check_count("--max-tokens", max_tokens, least=1)
    check_count("--sequence-length", sequence_length, least=1)
    check_count("--probe-tokens", probe_tokens, least=0)
    check_count("value_group", value_group, least=1)
    check_names("linears", linears, STATISTICS)
    check_names("factorized", factorized, LINEARS)
    _check_methods(methods, empty=linears is not None or factorized is not None)
    model = model_directory(model, revision)
    checkpoint = checked_model(model, out)
    sequence_length = min(sequence_length, checkpoint.config.max_position_embeddings)
    metrics = list(factorized) if factorized is not None else metrics_of(methods)
    if sequence_length < 2 and (probe_tokens or metrics):
        raise CheckpointError("sequences of 1 token: none can be predicted; make them longer")
    width = checkpoint.layout.layers[0].intermediate_size
    wanted = max(_LEAST_TOKENS, ENOUGH * width) if max_tokens is None else max_tokens
    tokens = calibration_sequences(model, texts, length=sequence_length, max_tokens=wanted)
    largest, heads = largest_value_group(checkpoint.layout), "heads" in methods or not methods
    if value_group and checkpoint.layout.num_key_value_heads % value_group:
        raise CheckpointError(
            f"value_group {value_group}: does not divide the model's "
            f"{checkpoint.layout.num_key_value_heads} value heads"
        )
    metadata = {
        "model_config_sha256": checkpoint.config_sha256,
        "tokens": str(tokens.numel()),
        "sequence_length": str(sequence_length),
        "probe_tokens": str(min(_whole_sequences(probe_tokens, sequence_length), tokens.numel())),
        "tokens_sha256": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
        "methods": ",".join(method for method in METHODS if method in methods),
        "format": FORMAT,
        "covariances": ",".join(linears if linears is not None else covariances_of(methods)),
        "metrics": ",".join(metrics),
        "metric_tokens": str(
            min(_whole_sequences(_METRIC_TOKENS, sequence_length), tokens.numel()) if metrics else 0
        ),
        "value_group": str(value_group or (largest if heads else 1)),
    }
    workspace = partial_of(out)
    with claimed(workspace, "calibrate", {}):
        file = stats_file(workspace / "stats.safetensors", checkpoint.layout, metadata)
        if tokens.numel() < _FEW * width:
            logger.warning(_few_tokens(tokens.numel(), width))
        logger.info(announcement(_work(checkpoint.layout, file, metadata), device))
        if not file.begun:
            for index in range(len(checkpoint.layout.layers)):
                _metrics_path(file, index).unlink(missing_ok=True)
            file.start()
        run = _Run(checkpoint, tokens, file, metadata, device, progress)
        _measure_metrics(run)
        _stream(run)
        _measure_whole(run)
        publish(file.path, out)


def checked_model(model: Path, out: Path) -> Checkpoint:
    """Open the dense model in `model`; raises GacError if it is none, or if `out` exists."""
    finished_before(out, "calibrate", {})
    refuse_existing(out)
    return open_dense(model)


def _check_methods(methods: Sequence[str], empty: bool) -> None:
    """Raise CheckpointError for unknown methods, or for none unless they may be `empty`."""
    check_names("--method", methods, METHODS)
    if not (methods or empty):
        raise CheckpointError(f"--method {methods}: expected some of {', '.join(METHODS)}")


@dataclass(frozen=True, slots=True)
class _Run:
    """What each pass over the model needs."""

    checkpoint: Checkpoint
    tokens: torch.Tensor  # [sequences, length]
    file: StatsFile
    metadata: Mapping[str, str]
    device: str
    progress: bool

    @property
    def model(self) -> Reference:
        return reference(self.checkpoint, device=self.device)

    def some(self, kind: str) -> torch.Tensor:
        """The sequences that the metadata sets aside as `kind`, e.g. "probe_tokens"."""
        wanted = int(self.metadata[kind]) // self.tokens.shape[1]
        return self.tokens[evenly_spread(wanted, len(self.tokens))]


def _few_tokens(tokens: int, width: int) -> str:
    enough = ENOUGH * width
    return (
        f"{tokens:,} tokens are {tokens / width:.1f} for each of an MLP's {width:,} channels; with "
        f"fewer than {_FEW} the model that comes out is clearly worse. Give text of {enough:,} "
        f"tokens or more, about {max(enough * 4 / 1e6, 0.1):.1f} MB, and no smaller --max-tokens"
    )


def _work(layout: ModelLayout, file: StatsFile, metadata: Mapping[str, str]) -> Work:
    shapes, methods = layer_shapes(layout, int(metadata["value_group"])), methods_of(metadata)
    return Work(
        layout=layout,
        tokens=int(metadata["tokens"]),
        covariances=tuple(shapes[name][0] for name in kept_covariances(metadata)),
        probes=len(probes(layout, methods)),
        probe_tokens=int(metadata["probe_tokens"]),
        metrics=tuple(metric_shapes(layout)[name][0] for name in kept_metrics(metadata)),
        metric_tokens=int(metadata["metric_tokens"]),
        file_bytes=file.size,
    )


def _whole_sequences(tokens: int, length: int) -> int:
    """`tokens` rounded down to whole sequences, but at least one sequence; 0 stays 0."""
    return max(tokens // length, 1) * length if tokens else 0


def _measure_metrics(run: _Run) -> None:
    """Write the metrics of every layer whose statistics are not on disk yet to a file of its own.

    A pass that was stopped begins anew: it takes much less time than the statistics.
    """
    file, linears = run.file, kept_metrics(run.metadata)
    missing = range(file.whole_layers(), len(run.checkpoint.layout.layers))
    if not linears or all(_metrics_path(file, index).exists() for index in missing):
        return

    def keep(index: int, metrics: Mapping[str, torch.Tensor]) -> None:
        stored = {metric_of(name): m.to("cpu", torch.float32) for name, m in metrics.items()}
        write_tensors(_metrics_path(file, index), stored)

    some = run.some("metric_tokens")
    with run.checkpoint.reader() as read:
        measure_output_metrics(run.model, read, some, linears, keep, progress=run.progress)


def _stream(run: _Run) -> None:
    """For every layer not on disk yet: observe it, append its statistics, pass its output on."""
    file, metadata, model = run.file, run.metadata, run.model
    layers, value_group = len(model.layout.layers), int(metadata["value_group"])
    linears, factorized = kept_covariances(metadata), kept_metrics(metadata)
    compressors = measured_methods(model.layout, metadata)
    done = file.whole_layers()
    done = done if _hidden_path(file, done).exists() else 0
    with run.checkpoint.reader() as read, torch.inference_mode():
        if done:
            shape = (*run.tokens.shape, model.layout.hidden_size)
            hidden = kept_tensors(_hidden_path(file, done), {"hidden": shape})["hidden"]
        else:
            hidden = embed(model, read, run.tokens)
        total = len(run.tokens) * (layers - done)
        with tqdm(total=total, desc="calibrate", unit="seq", disable=not run.progress) as bar:
            for index in range(done, layers):
                weights = layer_weights(model, read, index)
                stats, hidden = observe_layer(
                    model, weights, hidden, value_group, bar.update, linears
                )
                stats = {**stats, **_read_metrics(run, index, factorized)}
                steady = steadied(stats, int(metadata["tokens"]))
                layer = MeasuredLayer(model.layout, weights, steady, model.inv_freq)
                errors = {f"errors.{c.name}": c.errors(layer) for c in compressors}
                write_tensors(_hidden_path(file, index + 1), {"hidden": hidden})
                file.append(index, {**stats, **errors})
                _hidden_path(file, index).unlink(missing_ok=True)
                _metrics_path(file, index).unlink(missing_ok=True)


def _measure_whole(run: _Run) -> None:
    """Measure sensitivities on some of the sequences, and finish the file."""
    file, metadata, layout = run.file, run.metadata, run.checkpoint.layout
    shapes = whole_model_shapes(layout, metadata)
    measured = {name: torch.zeros(shape) for name, shape in shapes.items()} | {"tokens": run.tokens}
    file.finish(measured)  # without its last tensor the file cannot be read

    def statistics(index: int) -> LayerStats:
        stats = read_layer_stats(file.path, index, run.device)
        return steadied(stats, int(metadata["tokens"]))

    with run.checkpoint.reader() as read:
        some = run.some("probe_tokens")
        if len(some):
            tried = probes(layout, methods_of(metadata))
            with torch.inference_mode():
                found = measure(run.model, read, statistics, some, tried, progress=run.progress)
            measured["probes"] = found
    file.finish(measured)


def _read_metrics(run: _Run, index: int, linears: Sequence[str]) -> dict[str, torch.Tensor]:
    """The metrics of `linears` in layer `index` by `metric_of`, fp64."""
    if not linears:
        return {}
    shapes = metric_shapes(run.checkpoint.layout)
    expected = {metric_of(name): shapes[name] for name in linears}
    stored = kept_tensors(_metrics_path(run.file, index), expected)
    return {name: tensor.to(run.device, torch.float64) for name, tensor in stored.items()}


def _metrics_path(file: StatsFile, layer: int) -> Path:
    """The file of the metrics of `layer`, kept until its statistics are written."""
    return file.path.with_name(f"metrics-{layer:04}.safetensors")


def _hidden_path(file: StatsFile, layer: int) -> Path:
    """The file of the hidden states that enter `layer`, kept until its statistics are written."""
    return file.path.with_name(f"hidden-{layer:04}.safetensors")


def observe_layer(
    model: Reference,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    value_group: int = 1,
    advance: Callable[[int], object] = lambda sequences: None,
    linears: Sequence[str] = STATISTICS,
) -> tuple[LayerStats, torch.Tensor]:
    """Mean covariances of the inputs of a dense layer's `linears`, and the layer's output.

    Args:
        model: The dense model.
        weights: The layer's tensors, as `layer_weights` returns them.
        hidden: The hidden states that enter the layer, [count, length, hidden].
        value_group: How many value heads the input of o_proj spans.
        advance: Called with the number of sequences after each batch.
        linears: The linears whose input covariances are wanted.

    Returns:
        The covariances [in, in] by linear, or [in + 1, in + 1] where its bias counts as a column,
        the scores of normed pairs, and the output [count, length, hidden]. Products are computed in
        the model's dtype and summed in fp64. Tokens of massive activations are limited
        (outliers.py).
    """
    layer, weights = _grouped_values(model, weights, value_group)
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
        share = shares(rows, limits.setdefault(name, size_limit(rows)))
        if len(sums[name]) > rows.shape[1]:
            rows = pad(rows, (0, 1), value=1)  # what biases are multiplied by
        rows = share * rows
        sums[name] += rows.T @ rows

    energies: dict[str, torch.Tensor] = {}

    def observe_norms(name: str, heads: torch.Tensor) -> None:
        if name.endswith("_norm"):
            squares = heads.view(*heads.shape[:-1], 2, -1).square().sum(-2)
            total = squares.flatten(0, 1).sum(0, dtype=torch.float64)
            energies[name] = energies.get(name, 0) + total

    outputs = []
    for batch in batches(hidden):
        entering = batch.to(model.device)
        output = layer_forward(model, layer, weights, entering, observe, observe_norms)
        outputs.append(output.cpu())
        advance(len(batch))
    count = hidden.shape[0] * hidden.shape[1]
    stats = {name: total / count for name, total in sums.items()}
    if energies:
        query, key = (energies[f"self_attn.{x}_norm"] / count for x in "qk")
        stats[PAIR_SCORES] = normed_pair_scores(query, key).flatten()
    return stats, torch.cat(outputs)


def _grouped_values(
    model: Reference, weights: Mapping[str, torch.Tensor], group: int
) -> tuple[LayerLayout, Mapping[str, torch.Tensor]]:
    """The same dense layer with value heads of `group` times the size.

    Each query head then also reads the values of the neighbouring value heads. o_proj ignores
    them, but they are part of the observed input, by which merged value heads are chosen.
    """
    layout, layer = model.layout, model.layout.layers[0]
    if group == 1:
        return layer, weights
    wide = ValueLayout(layer.value.heads // group, layer.value.size * group)
    output = spread_output(
        weights["self_attn.o_proj.weight"], layer.value.heads, layout.head_dim, group
    )
    return replace(layer, value=wide), {**weights, "self_attn.o_proj.weight": output}

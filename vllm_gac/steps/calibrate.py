"""Measure the statistics of a dense model on text, which plans and compression need."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_gac.checkpoint.dense_model import open_dense
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.token_text import calibration_sequences
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
from vllm_gac.compression.passes import measure_statistics
from vllm_gac.compression.probes import probes
from vllm_gac.compression.statistics_file import (
    FORMAT,
    STATISTICS,
    StatsFile,
    covariances_of,
    kept_covariances,
    kept_metrics,
    largest_value_group,
    layer_shapes,
    methods_of,
    metric_shapes,
    metrics_of,
    stats_file,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LINEARS, ModelLayout
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
        measure_statistics(checkpoint, tokens, file, metadata, device, progress)
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

"""Measure the statistics of a dense model on text, which plans and compression need."""

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.engine_files import refuse_unserved
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, open_dense
from vllm_gac.compression.devices import free_memory, gpu_memory_told, prepare_device
from vllm_gac.compression.effort import Work, announcement
from vllm_gac.compression.measured import Measured, StatsSpec
from vllm_gac.compression.methods.registry import METHODS, methods_fault
from vllm_gac.compression.passes import measure_statistics
from vllm_gac.compression.statistics_file import FORMAT, stats_file
from vllm_gac.errors import CheckpointError
from vllm_gac.runs.workspace import claimed, end_workspace, partial_of, publish, refuse_existing
from vllm_gac.steps.calibrate.request import CalibrateRequest
from vllm_gac.steps.calibrate.text import calibration_texts, warn_of_no_conversation
from vllm_gac.texts.token_text import split_sequences
from vllm_gac.texts.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

# Tokens for each channel of an MLP. With 0.7 of the demo model's parameters and half its cache,
# the perplexity was 9.21 with 2.5 tokens, 8.53 with 9, 8.36 with 16, and 8.30 with all of the text.
ENOUGH, _FEW = 16, 8
_MIN_TOKENS = 1 << 16
# Tokens for the metrics of outputs, and tokens that are set aside for probes.
_METRIC_TOKENS = _HELD_TOKENS = 1 << 14
# Fewer sequences tell little about other text.
_FEW_HELD = 8


def calibrate(
    model: str | Path,
    texts: Sequence[str | Path],
    out: str | Path,
    request: CalibrateRequest | None = None,
    *,
    revision: str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> None:
    """Measure the statistics of a dense model on text, and write them to a file.

    Planning and compression read this file. Unfinished work is kept in `out`.partial, and the same
    call continues it.

    Args:
        model: Directory of a dense model, or its id on the Hub.
        texts: Text files, .jsonl or .parquet files with "text" or "messages" in each line, or data
            sets on the Hub: hf://datasets/ORGANIZATION/NAME. Only the demo model has a text of
            its own, which is taken if there are none.
        out: The safetensors file to write. If it exists with just these statistics, nothing is left
            to do.
        request: What to measure. None: a `CalibrateRequest` without any option.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        device: The torch device to compute on. None: the first GPU if there is one, else the CPU.
        progress: Whether to show a progress bar on stderr.

    Raises:
        CheckpointError: The model is not dense or of an unknown family, the texts are too short, or
            something else is at `out`.

    Examples:
        >>> import vllm_gac
        >>> vllm_gac.calibrate(
        ...     "llama",
        ...     ["text.txt"],
        ...     "stats.safetensors",
        ...     vllm_gac.CalibrateRequest(max_tokens=512),
        ... )
        >>> request = vllm_gac.PlanRequest(kv_ratio=0.5)
        >>> vllm_gac.plan("llama", request, "stats.safetensors").expected_loss is None
        False
    """
    out, request = Path(out), request or CalibrateRequest()
    device = prepare_device(device)
    directory = model_directory(model, revision)
    checkpoint = open_dense(directory)
    refuse_unserved(directory)
    if fault := methods_fault(checkpoint.kept, request.methods):
        raise CheckpointError(f"{directory}: {fault}")
    kept = StatsSpec.to_plan(checkpoint.layout, request.methods)
    files = calibration_texts(directory, texts)
    tokens = request.max_tokens, request.sequence_length
    write_statistics(checkpoint, files, out, kept, *tokens, device, progress)


def write_statistics(
    checkpoint: Checkpoint,
    texts: Sequence[Path],
    out: Path,
    kept: StatsSpec,
    max_tokens: int | None,
    sequence_length: int,
    device: str,
    progress: bool,
) -> None:
    """Measure what is `kept` of a dense model on `texts`, and write it to `out`.

    Raises CheckpointError if the texts are too short, or if another run works there.
    """
    sequence_length = min(sequence_length, checkpoint.config.max_position_embeddings)
    if sequence_length < 2:
        raise CheckpointError("sequences of 1 token: none can be predicted; make them longer")
    width = checkpoint.layout.layers[0].intermediate_size
    wanted = max(_MIN_TOKENS, ENOUGH * width) if max_tokens is None else max_tokens
    tokenizer = ModelTokenizer(checkpoint.directory)
    warn_of_no_conversation(tokenizer, texts, "calibrate on", checkpoint.directory)
    tokens, held = split_sequences(
        tokenizer, texts, length=sequence_length, fit_tokens=wanted, held_tokens=_HELD_TOKENS
    )
    if len(held) < _FEW_HELD:
        logger.warning(
            "only %s tokens of the text could be set aside from the fit, in sequences of %s: what "
            "is measured on them says little about other text; give more documents",
            f"{held.numel():,}",
            sequence_length,
        )
    measured = Measured.of({**checkpoint.identity, **_metadata(kept, tokens, held)})
    workspace = partial_of(out)
    file = stats_file(out, checkpoint.layout, measured)
    if file.whole:
        end_workspace(out)
        return
    refuse_existing(out)
    with claimed(workspace, "calibrate", {}):
        file = replace(file, path=workspace / "stats.safetensors")
        if tokens.numel() < _FEW * width and not checkpoint.layout.experts:
            logger.warning(_few_tokens(tokens.numel(), width))
        packed, unpacked = checkpoint.packed, checkpoint.unpacked_dtype
        weights = (
            (unpacked if name in packed else DTYPES[checkpoint.tensors[name].dtype], shape)
            for name, shape in checkpoint.layout.tensors().items()
        )
        weight_bytes = sum(dtype.bytes * math.prod(shape) for dtype, shape in weights)
        work = Work(checkpoint.layout, measured, weight_bytes, file.size)
        home = work.home(device, free_memory(device))
        logger.info(announcement(work, device, home))
        with gpu_memory_told(device):
            measure_statistics(checkpoint, tokens, held, file, measured, device, home, progress)
        publish(file.path, out)


def _metadata(kept: StatsSpec, tokens: torch.Tensor, held: torch.Tensor) -> dict[str, str]:
    """What a statistics file says of itself, of texts [sequences, length] as token ids."""
    length = tokens.shape[1]
    # Of whole sequences, and of one at least.
    metric_tokens = min(max(_METRIC_TOKENS // length, 1) * length, tokens.numel())
    return {
        "tokens": str(tokens.numel()),
        "tokens_sha256": _sha256(tokens),
        "held_tokens": str(held.numel()),
        "held_sha256": _sha256(held),
        "sequence_length": str(length),
        "probe_tokens": str(held.numel() if kept.methods else 0),
        "methods": ",".join(method for method in METHODS if method in kept.methods),
        "format": FORMAT,
        "covariances": ",".join(kept.covariances),
        "metrics": ",".join(kept.metrics),
        "metric_tokens": str(metric_tokens if kept.metrics else 0),
        "value_group": str(kept.value_group),
    }


def _sha256(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _few_tokens(tokens: int, width: int) -> str:
    enough = ENOUGH * width
    return (
        f"{tokens:,} tokens are {tokens / width:.1f} for each of an MLP's {width:,} channels; with "
        f"fewer than {_FEW} the model that comes out is clearly worse. Give text of {enough:,} "
        f"tokens or more, about {max(enough * 4 / 1e6, 0.1):.1f} MB, and no smaller --max-tokens"
    )

"""Checks a model directory before anything is loaded: its tensors must match the config."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.fused import without_fused
from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.locate import locate_weights, state_dict_files, without_weights
from vllm_gac.checkpoint.open import Checkpoint, faults, quantized
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Format, Imported
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.schema import HfConfig, validate

MAX_FAULTS_SHOWN = 5


def open_to_serve(directory: Path) -> tuple[Format, Checkpoint]:
    """Format and checkpoint of a directory, as `importers.open_any` opens it.

    On a GPU, a palu layer keeps latent keys only if they fit our decode kernel.

    Raises:
        CheckpointError: The directory is faulty, or cannot be served.
    """
    # Not at the top: importing these makes vLLM detect its platform.
    from vllm.platforms import current_platform

    from vllm_gac.serving.loading.decode_fit import fits_decode_kernel

    if (fault := refused_to_serve(directory)) is not None:
        raise CheckpointError(f"{directory}: {fault}")
    fits = fits_decode_kernel if current_platform.is_cuda() else None
    model_format, checkpoint = open_any_format(directory, fits)
    is_made = isinstance(checkpoint, Imported) and not checkpoint.is_stored_as_served
    if is_made and quantized(checkpoint.raw_config, directory):
        raise CheckpointError(
            f"{directory}: is quantized, and some of its tensors are made when it is served, as in "
            "a layer that skips a part, which packed tensors cannot be; run 'vllm-gac import' on "
            "the model that was quantized, and quantize what it writes"
        )
    return model_format, checkpoint


def refused_to_serve(directory: Path) -> str | None:
    """Why `directory` cannot be served, although verbs can read it; None if it can."""
    if not directory.is_dir() or any(directory.glob("*.safetensors*")):
        return None
    if state_dict_files(directory):
        return "pytorch_model*.bin are not served; 'vllm-gac import' makes safetensors of them"
    return without_weights(directory)


def preflight(
    directory: Path, layout: ModelLayout, raw_config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open the checkpoint in `directory` and check its headers against the layout to serve.

    Args:
        directory: A model directory in any format that we serve.
        layout: The layout that the files must have.
        raw_config: Content of config.json, used if the directory has none: with --download-dir,
            vLLM keeps config and weights of a model on the Hub apart.

    Raises:
        CheckpointError: The directory does not hold exactly the tensors of `layout`.
    """
    if raw_config is not None and not (directory / "config.json").exists():
        config = validate(HfConfig, dict(raw_config), "config.json")
        headers = read_headers(locate_weights(directory))
        tensors = without_fused(directory, config.model_type, layout, headers)
        checkpoint = Checkpoint(directory, raw_config, config, layout, tensors)
    else:
        _, checkpoint = open_to_serve(directory)
    if isinstance(checkpoint, Imported) and not checkpoint.is_stored_as_served:
        if checkpoint.layout != layout:
            raise CheckpointError(
                f"{directory}: not the model that is served: its dims differ, "
                f"{_difference(checkpoint.layout, layout)}; start a server with it"
            )
    else:
        # The served config counts, not the file: --hf-overrides may have changed it.
        fields = (getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint))
        checkpoint = dataclasses.replace(Checkpoint(*fields), layout=layout)
    named = list(itertools.islice(faults(checkpoint), MAX_FAULTS_SHOWN))
    if named:
        raise CheckpointError(f"refusing to serve {directory}: {'; '.join(named)}")
    return checkpoint


def _difference(stored: ModelLayout, served: ModelLayout) -> str:
    """Where two layouts differ first, as text."""
    pairs = zip(stored.layers, served.layers, strict=False)
    layers = [index for index, (one, other) in enumerate(pairs) if one != other]
    return f"first in layer {layers[0]}" if layers else "outside of its layers"

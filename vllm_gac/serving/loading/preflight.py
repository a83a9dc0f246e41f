"""Before anything is loaded: what is in a directory, and is it exactly what the config says?"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.open import Checkpoint, faults, read_config
from vllm_gac.checkpoint.pickles.state_dicts import state_dict_files
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import palu
from vllm_gac.importers.imported import Format, Imported
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.foreign import without_weights
from vllm_gac.layout.schema import HfConfig, validate

MAX_FAULTS_SHOWN = 5


def open_to_serve(directory: Path) -> tuple[Format, Checkpoint]:
    """As `open_any_format`; on a GPU without the latents that its decode kernel has no room for."""
    # Not at the top: vLLM looks for its platform when these are imported.
    from vllm.platforms import current_platform

    from vllm_gac.serving.loading.decode_fit import fits_decode_kernel

    if (fault := refused_to_serve(directory)) is not None:
        raise CheckpointError(f"{directory}: {fault}")
    model_format, checkpoint = open_any_format(directory)
    if model_format == "palu" and current_platform.is_cuda():
        raw = read_config(directory)
        return model_format, palu.read(directory, raw, checkpoint.tensors, fits_decode_kernel)
    return model_format, checkpoint


def refused_to_serve(directory: Path) -> str | None:
    """Why `directory` cannot be served though verbs may read it; None for what can be."""
    if not directory.is_dir() or any(directory.glob("*.safetensors*")):
        return None
    if state_dict_files(directory):
        return "pytorch_model*.bin are not served; 'vllm-gac import' makes safetensors of them"
    return without_weights(directory)


def preflight(
    directory: Path, layout: ModelLayout, raw_config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """The checkpoint in `directory`, in any format, to be served by `layout`; headers only.

    `raw_config` is the config.json of a directory that may have none: with --download-dir, vLLM
    keeps configs and weights of a model on the Hub apart. Raises CheckpointError unless it holds
    exactly the tensors that this takes.
    """
    if raw_config is not None and not (directory / "config.json").exists():
        config = validate(HfConfig, dict(raw_config), "config.json")
        headers = read_headers(directory)
        checkpoint = Checkpoint(directory, raw_config, config, layout, headers)
    else:
        _, checkpoint = open_to_serve(directory)
    if isinstance(checkpoint, Imported) and not checkpoint.is_stored_as_served:
        if checkpoint.layout != layout:
            raise CheckpointError(
                f"{directory}: not the model that is served, whose dims are others "
                f"({_difference(checkpoint.layout, layout)}); start the server with it"
            )
    else:
        # The served config rules, not the file: --hf-overrides may have changed it.
        fields = (getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint))
        checkpoint = dataclasses.replace(Checkpoint(*fields), layout=layout)
    shown = list(itertools.islice(faults(checkpoint), MAX_FAULTS_SHOWN))
    if shown:
        raise CheckpointError(f"refusing to serve {directory}: {'; '.join(shown)}")
    return checkpoint


def _difference(found: ModelLayout, served: ModelLayout) -> str:
    pairs = zip(found.layers, served.layers, strict=False)
    layers = [index for index, (a, b) in enumerate(pairs) if a != b]
    return f"first in layer {layers[0]}" if layers else "outside of its layers"

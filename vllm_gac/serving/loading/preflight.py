"""Checks a model directory before anything is loaded: its tensors must match the config."""

import dataclasses
import itertools
from pathlib import Path

from vllm_gac.checkpoint.fused import without_fused
from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.locate import locate_weights, state_dict_files, without_weights
from vllm_gac.checkpoint.open import Checkpoint, faults, quantized
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Format, Imported
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.gac_config import GacConfig

MAX_FAULTS = 5


def open_to_serve(directory: Path) -> tuple[Format, Checkpoint]:
    """Format and checkpoint of a directory, as `importers.open_any` opens it.

    On a GPU, a palu layer keeps latent keys only if they fit our decode kernel.

    Raises:
        CheckpointError: The directory is faulty, or cannot be served.
    """
    # Not at the top: importing these makes vLLM detect its platform.
    from vllm.platforms import current_platform

    from vllm_gac.serving.loading.decode_fit import fits_decode_kernel

    refuse_unserved_files(directory)
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


def refuse_unserved_files(directory: Path) -> None:
    """Raise CheckpointError if `directory` cannot be served, although verbs can read it."""
    if not directory.is_dir() or any(directory.glob("*.safetensors*")):
        return
    fault = without_weights(directory)
    if state_dict_files(directory):
        fault = "pytorch_model*.bin are not served; 'vllm-gac import' makes safetensors of them"
    raise CheckpointError(f"{directory}: {fault}")


def preflight(directory: Path, config: GacConfig) -> Checkpoint:
    """Locate and read the files in `directory`, and check their headers against what is served.

    Args:
        directory: A model directory in any format that we serve.
        config: The config that is served. Its stored layout is the one that the files must have.

    Raises:
        CheckpointError: The directory does not hold exactly the tensors of that layout.
    """
    layout, path = config.stored, directory / "config.json"
    # With --download-dir, vLLM keeps config and weights of a model on the Hub apart.
    raw = read_json(path) if path.exists() else config.to_dict()
    if raw.get("gac") is not None or not path.exists():
        refuse_unserved_files(directory)
        headers = read_headers(locate_weights(directory))
        is_dense = config.checked.gac is None
        stored = (
            without_fused(directory, config.model_type, layout, headers) if is_dense else headers
        )
        checkpoint = Checkpoint(directory, raw, config.checked, layout, stored)
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
    named = list(itertools.islice(faults(checkpoint), MAX_FAULTS))
    if named:
        raise CheckpointError(f"refusing to serve {directory}: {'; '.join(named)}")
    return checkpoint


def _difference(stored: ModelLayout, served: ModelLayout) -> str:
    """Where two layouts differ first, as text."""
    pairs = zip(stored.layers, served.layers, strict=False)
    layers = [index for index, (one, other) in enumerate(pairs) if one != other]
    return f"first in layer {layers[0]}" if layers else "outside of its layers"

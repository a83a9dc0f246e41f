"""Checks a model directory before anything is loaded: its tensors must match the config."""

from pathlib import Path

from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.locate import locate_weights, state_dict_files, without_weights
from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.checkpoint.own_tensors import without_fused
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.quantized_checkpoint import (
    check_packed,
    quantization_section,
    refuse_faulty,
)


def refuse_unserved_files(directory: Path) -> None:
    """Raise CheckpointError if `directory` cannot be served, although verbs can read it."""
    if not directory.is_dir() or any(directory.glob("*.safetensors*")):
        return
    fault = without_weights(directory)
    if state_dict_files(directory):
        fault = "pytorch_model*.bin are not served; save it as safetensors, by transformers"
    raise CheckpointError(f"{directory}: {fault}")


def preflight(directory: Path, config: GacConfig) -> Checkpoint | None:
    """Locate and read the files in `directory`, and check their headers against what is served.

    It may be a gac model or a dense one. Returns None if a quantizer has packed it, so that vLLM's
    own loader reads it. Raises CheckpointError unless the directory holds exactly the tensors of
    the stored layout of `config`, the one that is served.
    """
    layout = config.stored
    if (quantization := quantization_section(config)) is not None:
        check_packed(directory, layout, quantization)
        return None
    refuse_unserved_files(directory)
    headers = read_headers(locate_weights(directory))
    is_dense = "gac" not in config.original
    stored = without_fused(directory, config.model_type, layout, headers) if is_dense else headers
    # The served config counts, not the file: --hf-overrides may have changed it.
    checkpoint = Checkpoint(directory, config.original, config.checked, layout, stored)
    if checkpoint.unread is None and checkpoint.quantization is not None:
        # By the older key vLLM would pack linear layers, too, and our loader would not.
        refuse_faulty(directory, ["config.json: compression_config: name it quantization_config"])
    advice = "; 'vllm-gac import' reads what other tools wrote" if is_dense else ""
    refuse_faulty(directory, faults(checkpoint), advice)
    return checkpoint

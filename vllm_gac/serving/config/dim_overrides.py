"""Dims that are changed by --hf-overrides: tensors have those that config.json says.

Most would change nothing, for the "gac" object has the dims of every layer; others would fail at a
tensor's shape, without a word of the option.
"""

from typing import TYPE_CHECKING

from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading.as_read import as_read
from vllm_gac.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What a layout is made of: vllm_gac.layout.dims reads no other key.
FIXED = (
    "gac",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)


def check_dims(hf_config: "PreTrainedConfig") -> None:
    """Check that options left the dims of a gac model alone.

    Args:
        hf_config: Its config as vLLM overrode it, before dims are padded.

    Raises:
        CheckpointError: A dim is not what config.json says.
    """
    read, now = as_read(hf_config), hf_config.to_dict()
    if read is None:
        return
    for key in FIXED:
        if now.get(key) != read.get(key):
            changed = "" if key == "gac" else f" from {shown(read.get(key))} to {shown(now[key])}"
            raise CheckpointError(
                f"--hf-overrides: changes {key}{changed}, but the tensors of a gac model have the "
                "dims that its config.json says; leave it out"
            )

"""Refuses --hf-overrides that change dims: the tensors have the dims of config.json.

Most such overrides would have no effect, because the "gac" object has the dims of every layer. The
others would fail later at a tensor's shape, with an error that does not name the option.
"""

from typing import TYPE_CHECKING

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.serving.loading.original_config import original_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The keys that vllm_gac.layout.dims reads.
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
# The same of a mixture of experts, whose number has two names.
FIXED_OF_EXPERTS = ("moe_intermediate_size", "num_experts", "num_local_experts")


def check_dims(hf_config: "PreTrainedConfig") -> None:
    """Check that options left the dims of a gac model alone.

    Args:
        hf_config: Its config as vLLM overrode it, before dims are padded.

    Raises:
        CheckpointError: A dim is not what config.json says.
    """
    original, current = original_config(hf_config), hf_config.to_dict()
    if original is None:
        return
    for key in (*FIXED, *FIXED_OF_EXPERTS):
        before, after = original.get(key), current.get(key)
        if before != after:
            changed = "" if key == "gac" else f" from {sanitize(before)} to {sanitize(after)}"
            raise CheckpointError(
                f"--hf-overrides: changes {key}{changed}, but the tensors of a gac model have the "
                "dims that its config.json says; leave it out"
            )

"""The two layouts in a transformers config: the served one and the stored one.

They differ if dims are padded at load time, or if heads are repeated for many GPUs. Both travel
with the config to every process, so that loading, reloading, quantization and sleep mode use the
same ones.
"""

from typing import TYPE_CHECKING

from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.serving.loading.original_config import original_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.config import ModelConfig

# Attributes for the "gac" object and the KV heads of the stored layout. They are set only if the
# served layout is padded or has repeated heads.
_STORED = "gac_stored"
_STORED_KV_HEADS = "gac_stored_kv_heads"


def layout_of_hf(hf_config: "PreTrainedConfig") -> ModelLayout:
    """The layout to serve. Raises CheckpointError if the config is faulty."""
    return layout_of(hf_config.to_dict(), _where(hf_config))


def check_overridden(hf_config: "PreTrainedConfig") -> None:
    """Check the config.json that was read, and then what options made of it.

    Raises:
        CheckpointError: The config is faulty. It names config.json, or the option if config.json
            alone is well-formed.
    """
    original = original_config(hf_config)
    if original is not None:
        layout_of(original, _where(hf_config))
    layout_of(hf_config.to_dict(), _where(hf_config) if original is None else "--hf-overrides")


def stored_layout(hf_config: "PreTrainedConfig") -> ModelLayout:
    """The layout of the files. Raises CheckpointError if the config is faulty."""
    raw = hf_config.to_dict()
    if _STORED in raw:
        raw |= {"gac": raw[_STORED], "num_key_value_heads": raw[_STORED_KV_HEADS]}
    return layout_of(raw, _where(hf_config))


def set_served_layout(model_config: "ModelConfig", served: ModelLayout) -> None:
    """Make `served` the layout to serve, and keep the stored one beside it."""
    hf_config = model_config.hf_config
    if not hasattr(hf_config, _STORED):
        setattr(hf_config, _STORED, hf_config.gac)
        setattr(hf_config, _STORED_KV_HEADS, hf_config.num_key_value_heads)
    hf_config.gac = served.section(getattr(hf_config, _STORED).get("source"))
    hf_config.num_key_value_heads = served.num_key_value_heads
    hf_config.head_dim = served.cache_head_dim
    # vLLM sizes scratch memory by the head size in it.
    model_config.model_arch_config = model_config.get_model_arch_config()


def _where(hf_config: "PreTrainedConfig") -> str:
    name = hf_config.name_or_path
    return f"{name}/config.json" if name else "config.json"

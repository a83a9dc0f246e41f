"""Decides in the front-end process whether low-rank linears are served as their products.

In FP8 two factors take longer than the linear that they replace (docs/decisions.md). A model that
was planned for 16 bits may have them all the same. Multiplied, they take the time of that linear,
and its memory, which the KV cache lacks.
"""

import re
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.config.cache_layout import kv_token_bytes
from vllm_gac.serving.config.quantization import quantizations
from vllm_gac.serving.loading.merged_factors import check_has_factors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


def merged_layout(vllm_config: "VllmConfig", stored: ModelLayout) -> ModelLayout:
    """`stored` with the factors of each low-rank linear multiplied out; a log line says the price.

    Raises:
        CheckpointError: No linear is low rank, or the factors have to stay apart.
    """
    check_has_factors(stored)
    if (reason := unmergeable(vllm_config)) is not None:
        raise CheckpointError(
            f"--model-loader-extra-config: merge_factors: cannot multiply factors out, because "
            f"{reason}; leave it out"
        )
    merged = stored.without_ranks()
    more = (merged.parameters - stored.parameters) * _weight_bits(vllm_config) / 8
    logger.info(
        "Multiplying out the factors of %d low-rank linears: %+.2f %% parameters, about %+.2f "
        "GB of weights, so %s tokens in the KV cache",
        stored.low_rank_linears,
        100 * (merged.parameters / stored.parameters - 1),
        more / 1e9,
        f"{-more / kv_token_bytes(stored, vllm_config):+,.0f}",
    )
    return merged


def unmergeable(vllm_config: "VllmConfig") -> str | None:
    """Why the factors of low-rank linears have to stay apart; None if they can be multiplied."""
    if getattr(vllm_config.model_config.hf_config, "quantization_config", None) is not None:
        return "they are quantized already"
    if vllm_config.weight_transfer_config is not None:
        return "a trainer (--weight-transfer-config) sends them apart"
    if vllm_config.lora_config is not None:
        return "LoRA adapters (--enable-lora) of this model adapt each by itself"
    return None


def _weight_bits(vllm_config: "VllmConfig") -> int:
    """Bits of a number in a linear, after quantization while loading."""
    names = quantizations(vllm_config.model_config)
    bits_by_name = [int(bits) for name in names for bits in re.findall(r"(?:fp|int)(\d+)", name)]
    return min(bits_by_name, default=8 * vllm_config.model_config.dtype.itemsize)

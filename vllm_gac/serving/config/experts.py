"""Refuses what was not tried with a mixture of experts whose attention is compressed."""

from typing import TYPE_CHECKING

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_experts(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Check the options that concern experts, which vLLM's own block honours in ways of its own.

    Raises:
        CheckpointError: One is given, and the model has experts.
    """
    if layout.experts is None:
        return
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    packed = getattr(model.hf_config, "quantization_config", None)
    for option, is_given in (
        ("config.json: quantization_config", packed is not None),
        ("--quantization", model.quantization or model.quantization_config),
        ("--enable-lora", vllm_config.lora_config),
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--enable-eplb", parallel.enable_eplb),
        ("--enable-dbo", parallel.enable_dbo),
        ("--data-parallel-size", parallel.data_parallel_size > 1),
    ):
        if is_given:
            raise CheckpointError(
                f"{option}: not tried with experts beside compressed attention; leave it out, or "
                "serve the dense model"
            )

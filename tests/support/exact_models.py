"""Small dense models in fp64, without files: to compare what is derived by hand with autograd."""

from typing import Any

import torch

from tests.support.dense_models import LLAMA3_ROPE, config, weights
from vllm_gac.compression.reference_model import Reference, reference_of
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig, validate

# Changes to `dense_models.config`.
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "llama3": {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "smollm3": {"model_type": "smollm3"},
}


def exact_model(**changes: Any) -> tuple[Reference, dict[str, torch.Tensor]]:
    """The model of `dense_models.config(**changes)`, and its tensors."""
    raw = config(**changes)
    model = reference_of(layout_of(raw), validate(HfConfig, raw, "config.json"), torch.float64)
    return model, {name: tensor.double() for name, tensor in weights(raw).items()}


def random_tokens(count: int, length: int) -> torch.Tensor:
    """[count, length] tokens, the same on every call."""
    return torch.randint(128, (count, length), generator=torch.Generator().manual_seed(0))

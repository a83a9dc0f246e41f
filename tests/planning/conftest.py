"""Models of several shapes, of which there is only the config."""

import pytest

from benchmarks.common.llama3_8b import DENSE as LLAMA_8B
from tests.planning.test_plan_file import DEMO, Models, model
from vllm_gac.checkpoint.open import Checkpoint


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """By name; "big" is a Llama-3-8B of three layers."""
    directory = tmp_path_factory.mktemp("models")
    return {
        "8B": model(directory / "8b", **LLAMA_8B),
        "big": model(directory / "big", **LLAMA_8B | {"num_hidden_layers": 3}),
        "demo": model(directory / "demo", **DEMO),
        "tiny": model(directory / "tiny"),
        "mha": model(directory / "mha", num_key_value_heads=4),
        "odd": model(directory / "odd", num_attention_heads=6, num_key_value_heads=3, head_dim=24),
    }


@pytest.fixture(scope="package")
def demo(models: dict[str, Checkpoint]) -> Checkpoint:
    return models["demo"]

"""Options about the sliding window take effect in a gac model, or are refused by their name."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.serving.models import HETEROGENEOUS, write_model
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.overrides import resolve_overrides
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.gac_config import GacConfig

LAYERS = [HETEROGENEOUS[0], HETEROGENEOUS[5]]
QWEN2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 45, "max_window_layers": 0}
CONFIGS = {
    "on": QWEN2 | {"use_sliding_window": True},
    "off": QWEN2 | {"use_sliding_window": False},
    "mistral": {"model_type": "mistral", "sliding_window": 45},
    "llama": {"model_type": "llama"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windows")
    for name, config in CONFIGS.items():
        write_model(directory / name, LAYERS, **config)
    return directory


def window_of(directory: Path, overrides: dict[str, Any]) -> int | None:
    """The window that vLLM's attention layers get, by the rule of vLLM's arg_utils."""
    _, hf_config = GacConfigParser().parse(directory, trust_remote_code=False)
    hf_config.update(overrides)
    config = GacConfig.of(hf_config)
    resolve_overrides(config)
    resolve_overrides(config)  # vLLM may run the hook on the same config twice
    kinds = getattr(hf_config, "layer_types", None)
    all_windowed = kinds is None or set(kinds) == {"sliding_attention"}
    window: int | None = hf_config.sliding_window if all_windowed else None
    return window


@pytest.mark.parametrize(
    ("model", "overrides", "expected"),
    [
        ("on", {}, 45),
        ("on", {"sliding_window": 30}, 30),
        ("on", {"sliding_window": None}, None),  # --disable-sliding-window arrives like this, too
        ("on", {"sliding_window": None, "use_sliding_window": False}, None),
        ("off", {}, None),
        ("off", {"use_sliding_window": False}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
    ],
)
def test_what_vllm_honours_is_served(
    model: str, overrides: dict[str, Any], expected: int | None, models: Path
) -> None:
    assert window_of(models / model, overrides) == expected


@pytest.mark.parametrize(
    ("model", "overrides", "says"),
    [
        ("off", {"use_sliding_window": True}, "use_sliding_window"),
        ("on", {"use_sliding_window": False}, "sliding_window"),
        ("on", {"max_window_layers": 1}, "max_window_layers"),
        ("on", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("off", {"sliding_window": 45}, "sliding_window .*45"),
        ("mistral", {"use_sliding_window": False}, "use_sliding_window"),
        ("llama", {"sliding_window": 64}, "sliding_window: .*64"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_vllm_would_ignore_is_refused(
    model: str, overrides: dict[str, Any], says: str, models: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"^--hf-overrides: .*{says}"):
        window_of(models / model, overrides)


def test_a_window_that_no_request_can_leave_may_be_disabled(models: Path) -> None:
    arguments: dict[str, Any] = {"disable_sliding_window": True, "skip_tokenizer_init": True}
    for length in (None, 45):
        served = EngineArgs(
            model=str(models / "on"), max_model_len=length, **arguments
        ).create_model_config()
        assert (served.max_model_len, served.get_sliding_window()) == (45, None)
    with pytest.raises(ValueError, match="max_model_len"):
        EngineArgs(model=str(models / "on"), max_model_len=46, **arguments).create_model_config()

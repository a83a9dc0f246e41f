"""The sliding window after options: honoured where vLLM honours them, refused where it would not.

transformers' configs read most keys about windows once, when config.json is read. vLLM changes the
keys of the finished config, and then reads `sliding_window` and `layer_types` only.
"""

from typing import TYPE_CHECKING, Any

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.serving.loading.original_config import original_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_READ_ONCE = ("use_sliding_window", "max_window_layers", "layer_types")


def resolve_window(hf_config: "PreTrainedConfig") -> None:
    """Check that options about windows take effect, and let all keys say what they ended in.

    Without a window, by --disable-sliding-window or an override, no layer has one.

    Args:
        hf_config: The config of a gac model as vLLM overrode it. Its keys about windows are changed
            to agree with a window that was turned off.

    Raises:
        CheckpointError: An override changes a key that is not read any more, or gives a window to
            layers that config.json says have none.
    """
    original, current = original_config(hf_config), hf_config.to_dict()
    if original is None:
        return
    window, before = current.get("sliding_window"), original.get("sliding_window")
    kinds = original.get("layer_types") or []
    if window is None and before is not None:
        _turn_off(hf_config, kinds)
        return
    for key in _READ_ONCE:
        if current.get(key) != original.get(key):
            raise CheckpointError(f"--hf-overrides: changes {key}{_no_effect(key, current)}")
    if window != before and "full_attention" in kinds:
        raise CheckpointError(
            f"--hf-overrides: changes sliding_window to {sanitize(window)}, but config.json says "
            f"that {kinds.count('full_attention')} of {len(kinds)} layers have none, and vLLM "
            "gives none; change it in config.json, with use_sliding_window and max_window_layers"
        )


def _no_effect(key: str, current: dict[str, Any]) -> str:
    value, instead = current.get(key), "change it in config.json instead"
    if key == "use_sliding_window" and value is False:
        instead = 'for no window, give {"sliding_window": null}'
    return f" to {sanitize(value)}, which has no effect after config.json is read; {instead}"


def _turn_off(hf_config: "PreTrainedConfig", kinds: list[Any]) -> None:
    if "sliding_attention" in kinds:
        hf_config.layer_types = ["full_attention"] * len(kinds)
        hf_config.use_sliding_window = False

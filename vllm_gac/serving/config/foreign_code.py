"""Makes sure that only our code serves a gac model.

vLLM chooses the model class by the architecture in config.json, which options may change. vLLM's
own classes do not know the dims of each layer. Where a tensor is missing they would serve whatever
is in memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gac.checkpoint.untrusted_files import MAX_BYTES, read_bounded, read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES, LOAD_FORMAT

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Architectures that vLLM's own code serves from tensors with a Llama's names.
FOREIGN = (*(family.architecture for family in FAMILIES.values()), "TransformersForCausalLM")


class ForeignCodeHook:
    """Hook of the architectures FOREIGN in vLLM's MODELS_CONFIG_MAP.

    When vLLM calls it, all options that may change the architecture have been applied:
    --hf-overrides, --hf-config-path, --config-format and --model-impl. Like GacConfigHook it does
    not inherit from vLLM's class.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Raise CheckpointError if the model is a gac model."""
        raw: Mapping[str, Any] = {}
        with suppress(CheckpointError):  # a model on the Hub, or a fault that vLLM explains better
            raw = read_json(Path(model_config.model) / "config.json")
        gac = raw.get("gac") or getattr(model_config.hf_config, "gac", None)
        refuse_foreign_code(model_config.model, {"gac": gac}, [model_config.architecture])

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Leave a model that passed the first check to vLLM, but for what is asked of ours.

        With our attention and our loader, the layers are ours, too.
        """
        # Not at the top: the parser imports this module before vLLM's registries are there.
        from vllm_gac.serving.config.cache_layout import choose_cache_layout
        from vllm_gac.serving.config.engine_options import (
            check_backends,
            check_gac_on_dense,
            gac_backend_requested,
        )
        from vllm_gac.serving.config.hook import GacConfigHook
        from vllm_gac.serving.config.pipeline_stages import forget_stages
        from vllm_gac.serving.config.served_layout import resolve_cache_dtype
        from vllm_gac.serving.gac_config import serve_by_our_layers

        if vllm_config.model_config.runner_type != "draft":  # whose workers serve our model, too
            forget_stages()
        check_backends(vllm_config)
        if not gac_backend_requested(vllm_config):
            return
        resolve_cache_dtype(vllm_config)  # what is checked depends on it
        check_gac_on_dense(vllm_config)
        if vllm_config.load_config.load_format == LOAD_FORMAT:
            serve_by_our_layers(vllm_config.model_config)
            GacConfigHook.verify_and_update_config(vllm_config)
        else:
            choose_cache_layout(vllm_config)


def refuse_foreign_code(
    model: str | Path,
    raw: Mapping[str, Any],
    architectures: Sequence[str] | None,
    overrides: object = None,
) -> None:
    """Raise CheckpointError for a gac model that a class other than ours would serve.

    Args:
        model: The model, as named on the command line.
        raw: Its config.json, of a gac model if it has a "gac" object.
        architectures: The architectures that vLLM reads from it.
        overrides: The value of --hf-overrides, whose `architectures` replace the model's own.
    """
    if raw.get("gac") is None:
        return
    where = f"{model}/config.json"
    if isinstance(overrides, Mapping) and "architectures" in overrides:
        where, architectures = "--hf-overrides", overrides["architectures"]
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(
            f'{where}: architectures is {sanitize(architectures)}, and {model} has a "gac" object: '
            "vLLM's code for another architecture would not check its tensors; it must be "
            f"{[ARCHITECTURE]}"
        )


def mentions_gac(path: Path) -> bool:
    """Whether a config.json contains the key "gac", even if it is not well-formed JSON."""
    with suppress(CheckpointError):
        return b'"gac"' in read_bounded(path, CheckpointError, MAX_BYTES)
    return False

"""A gac model is served by our code alone.

vLLM chooses its code by a model's architecture, which config.json says and options may change. Its
own would not know the dims, and would serve what a missing tensor leaves in memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gac.checkpoint.strict_json import MAX_BYTES, read_bounded, read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.shown import shown

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# By what names vLLM serves tensors that are called as a Llama's with code of its own.
FOREIGN = ("LlamaForCausalLM", "MistralForCausalLM", "TransformersForCausalLM")


class ForeignCodeHook:
    """Hook of the architectures FOREIGN in vLLM's MODELS_CONFIG_MAP; as GacConfigHook, no subclass.

    Here options have changed all that they can: --hf-overrides, --hf-config-path,
    --config-format and --model-impl.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Raise CheckpointError if the model is a gac model."""
        raw: Mapping[str, Any] = {}
        with suppress(CheckpointError):  # a model on the Hub, or one that vLLM says more about
            raw = read_json(Path(model_config.model) / "config.json")
        gac = raw.get("gac") or getattr(model_config.hf_config, "gac", None)
        refuse_foreign_code(model_config.model, {"gac": gac}, [model_config.architecture])

    @staticmethod
    def verify_and_update_config(vllm_config: object) -> None:
        """Nothing: a model that came so far is vLLM's."""


def refuse_foreign_code(
    model: str | Path,
    raw: Mapping[str, Any],
    architectures: Sequence[str] | None,
    overrides: object = None,
) -> None:
    """Raise CheckpointError if `raw`, a config, has a "gac" object and is another's to serve.

    `overrides` are those of --hf-overrides, which rule over the model's own `architectures`.
    """
    if raw.get("gac") is None:
        return
    where = f"{model}/config.json"
    if isinstance(overrides, Mapping) and "architectures" in overrides:
        where, architectures = "--hf-overrides", overrides["architectures"]
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(
            f'{where}: architectures is {shown(architectures)}, and {model} has a "gac" object: '
            "vLLM's code for another architecture would not check its tensors; it must be "
            f"{[ARCHITECTURE]}"
        )


def speaks_of_gac(path: Path) -> bool:
    """Whether a config.json that is not well-formed has the key "gac", be it twice."""
    with suppress(CheckpointError):
        return b'"gac"' in read_bounded(path, CheckpointError, MAX_BYTES)
    return False

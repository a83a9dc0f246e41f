"""Every name of vLLM that gac models need and that vLLM promises to nobody.

vLLM's plugin interfaces are entry points, `ModelRegistry`, `register_backend` and stat loggers.
What a gac model needs beside them is here: one function a name, which says for what, and why no
public way does. All of it was read in vLLM 0.32. To serve another release, read this file against
its sources and run tests/serving (docs/how-to-add.md).

Other modules of vLLM are imported by the functions that need them: registration must not.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import _encode_layer_name, vllm_lib

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.load import LoadConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.model_loader import BaseModelLoader
    from vllm.v1.attention.backend import CommonAttentionMetadata

# ---- registration ----------------------------------------------------------------------------


def config_parsers() -> dict[str, Any]:
    """Parsers of config.json by config format; what `--config-format hf` calls is replaced.

    `register_config_parser` adds a format, and a user would have to name it; gac models are found
    whatever format is asked for.
    """
    from vllm.transformers_utils import config

    parsers: dict[str, Any] = config._CONFIG_FORMAT_TO_CONFIG_PARSER
    return parsers


def config_hooks() -> dict[str, Any]:
    """By architecture, what checks and changes a VllmConfig in the front end, before any worker."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    hooks: dict[str, Any] = MODELS_CONFIG_MAP
    return hooks


def add_loader(load_format: str, make: "Callable[[LoadConfig], BaseModelLoader]") -> None:
    """Have `--load-format` take another value.

    `register_model_loader` wants the class, hence our loader and torch imported in every process.
    """
    from vllm.model_executor import model_loader

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[load_format] = make


# ---- configuration ---------------------------------------------------------------------------


def online_quantizations() -> dict[str, Any]:
    """What each value of `--quantization` that quantizes while loading stands for."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    shorthands: dict[str, Any] = _ONLINE_SHORTHANDS
    return shorthands


def is_first_api_server(vllm_config: "VllmConfig") -> bool:
    """Whether this process may say once what all API servers of a deployment know."""
    rank: int = vllm_config.parallel_config._api_process_rank
    return rank <= 0


# ---- attention -------------------------------------------------------------------------------


def break_graphs_at(module: str, name: str) -> None:
    """Have the attention op `name` of the imported `module` break CUDA graphs.

    vLLM decides whether it does when it imports the module, and offers no later way. Without it the
    op is captured with a dummy batch, and replayed with that.
    """
    from vllm.compilation import breakable_cudagraph
    from vllm.platforms import current_platform

    if not breakable_cudagraph.is_breakable_cudagraph_enabled():
        return
    op = getattr(sys.modules[module], name)
    if op.__globals__["__name__"] != breakable_cudagraph.__name__:
        op = breakable_cudagraph.eager_break_during_capture(op)
        setattr(sys.modules[module], name, op)
        vllm_lib.impl(name, op, dispatch_key=current_platform.dispatch_key, allow_override=True)


def write_cache(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> torch.Tensor:
    """Cache keys and values by the implementation of the attention layer of that name.

    As `Attention.forward` does it, whose own shapes fit no layer of unequal heads. Both ops are
    opaque to torch.compile.

    Returns:
        What `attend` takes as `written`, so that it runs afterwards.
    """
    name = _encode_layer_name(layer_name)
    written: torch.Tensor = torch.ops.vllm.unified_kv_cache_update(key, value, name)
    return written


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
    written: torch.Tensor | None,
) -> None:
    """Fill `output` by the implementation of that attention layer; see `write_cache`."""
    torch.ops.vllm.unified_attention_with_output(
        query, key, value, output, _encode_layer_name(layer_name), kv_cache_dummy_dep=written
    )


def notes_on(common: "CommonAttentionMetadata") -> dict[str, Any]:
    """A dictionary that lives as long as a step's metadata, which all metadata builders are given.

    vLLM asks one builder a class of heads; what the step means is the same for all of them.
    """
    return vars(common)


# ---- LoRA ------------------------------------------------------------------------------------


def fit_before_validation(manager: "LoRAModelManager", fit: "Callable[[LoRAModel], None]") -> None:
    """Have `manager` pass every adapter to `fit` before it validates it.

    That is the one place that sees an adapter between its files and its buffers.
    """
    validate = manager._validate_modules_to_save

    def fit_and_validate(adapter: "LoRAModel") -> None:
        fit(adapter)
        validate(adapter)

    manager._validate_modules_to_save = fit_and_validate

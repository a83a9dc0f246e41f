"""Every internal name of vLLM that gac models need. vLLM may change these without notice.

vLLM's plugin interfaces are entry points, `ModelRegistry`, `register_backend` and stat loggers.
Everything else that gac models use is here, one function for each name. Each says what the name is
for and why no public interface serves. Where supported releases differ, a function takes whichever
name vLLM has, and says which release has which. `make check-vllm VERSION=` compares all of it, and
the public names, with the sources of any release (docs/how-to-add.md).

The functions import vLLM's modules themselves, because registration must not import them.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import _encode_layer_name, vllm_lib

from vllm_gac.errors import VersionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.load import LoadConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.model_loader import BaseModelLoader
    from vllm.v1.attention.backend import CommonAttentionMetadata

# ---- registration ----------------------------------------------------------------------------


def config_parsers() -> dict[str, Any]:
    """vLLM's config parsers by config format; we replace the one for `hf`.

    `register_config_parser` can only add a format, which users would have to name. gac models must
    be recognized without a flag.
    """
    from vllm.transformers_utils import config

    parsers: dict[str, Any] = config._CONFIG_FORMAT_TO_CONFIG_PARSER
    return parsers


def config_hooks() -> dict[str, Any]:
    """vLLM's config hooks by architecture.

    A hook checks and changes a VllmConfig in the front end, before any worker starts. vLLM has no
    function to register one.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    hooks: dict[str, Any] = MODELS_CONFIG_MAP
    return hooks


def add_loader(load_format: str, make: "Callable[[LoadConfig], BaseModelLoader]") -> None:
    """Add a value to `--load-format`; `make` makes its loader from vLLM's load config.

    `register_model_loader` takes the class itself, so every process would import our loader and
    torch.
    """
    from vllm.model_executor import model_loader

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[load_format] = make


# ---- configuration ---------------------------------------------------------------------------


def online_quantizations() -> dict[str, Any]:
    """By value of `--quantization`, the config it stands for if it quantizes while loading."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    shorthands: dict[str, Any] = _ONLINE_SHORTHANDS
    return shorthands


def is_first_api_server(vllm_config: "VllmConfig") -> bool:
    """Whether this process is the first, or only, API server. Others should not repeat its log."""
    rank: int = vllm_config.parallel_config._api_process_rank
    return rank <= 0


# ---- attention -------------------------------------------------------------------------------


def break_graphs_at(module: str, name: str) -> None:
    """Make the attention op `name` of the imported `module` break CUDA graphs.

    vLLM decides this when it imports the module, and offers no way to change it later. Without the
    break, the op is captured with a dummy batch and replayed with that.
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
    """Cache this step's keys and values by the backend of an attention layer.

    `Attention.forward` calls the same op, but its shapes do not fit layers with unequal heads. The
    op is opaque to torch.compile, as is that of `attend`.

    Args:
        key: [tokens, KV heads, width of a row's key part].
        value: [tokens, KV heads, value size].
        layer_name: The layer's name in vLLM.

    Returns:
        A tensor to pass to `attend` as `written`, which makes attention run after this op.
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
    """Run the backend of an attention layer, by the op that `Attention.forward` calls.

    Args:
        query: [tokens, query heads, query size].
        key, value: As for `write_cache`.
        output: [tokens, query heads, value size]; is overwritten.
        layer_name: The layer's name in vLLM.
        written: What `write_cache` returned; None if the cache was written in another way.
    """
    torch.ops.vllm.unified_attention_with_output(
        query, key, value, output, _encode_layer_name(layer_name), kv_cache_dummy_dep=written
    )


def kernel_calls() -> Any:
    """The module with vLLM's own kernels as functions, which its layers call.

    We measure kernels alone. vLLM's layers, which are public, belong to an engine.
    """
    from vllm import _custom_ops

    return _custom_ops


def swiglu_kernel() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """vLLM's kernel silu(gate) * up, from an output and gate and up; `kernel_calls` lacks it."""
    kernel_calls()  # registers the operators
    kernel: Callable[[torch.Tensor, torch.Tensor], None] = torch.ops._C.silu_and_mul
    return kernel


def packed_linear(size: int, width: int, group: int) -> tuple[torch.nn.Module, Any]:
    """A linear of random weights of four bits, as vLLM serves compressed-tensors' W4A16.

    It has `size` output and `width` input features, and `group` elements of a row share a scale. We
    measure it alone; vLLM's layers belong to an engine.

    Returns the module with the parameters, on torch's default device, and what multiplies by them
    with `apply_weights(module, x, None)`.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    with set_current_vllm_config(_engine_of_one_rank()):
        scheme, module = schemes.CompressedTensorsWNA16("group", 4, group), torch.nn.Module()
        module.register_parameter("bias", None)  # read where a CPU has AMX
        scheme.create_weights(module, size, width, [size], width, torch.bfloat16, lambda *_: None)
        module.get_parameter("weight_packed").data.random_()
        module.get_parameter("weight_scale").data.fill_(width**-0.5)
        scheme.process_weights_after_loading(module)
    return module, scheme


@cache
def _engine_of_one_rank() -> "VllmConfig":
    """What vLLM's parameters and kernels ask for: a config, a rank, memory for Marlin's locks."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    config = VllmConfig()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as directory:
        distributed.init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        distributed.ensure_model_parallel_initialized(1, 1)
        init_workspace_manager(torch.get_default_device())
    return config


def step_scratch(common: "CommonAttentionMetadata") -> dict[str, Any]:
    """The attributes of a step's metadata, as a dictionary to which builders may add.

    vLLM passes the same metadata to the builders of all classes of heads in a step, but has no
    place for what they share.
    """
    return vars(common)


# ---- LoRA ------------------------------------------------------------------------------------

# What a manager checks an adapter with: the name in vLLM 0.33 and later, then the one before.
_ADAPTER_CHECKS = ("_validate_classification_head_lora", "_validate_modules_to_save")


def fit_before_validation(manager: "LoRAModelManager", fit: "Callable[[LoRAModel], None]") -> None:
    """Make `manager` pass every adapter to `fit` before it validates it.

    No other method sees an adapter after its files are read and before it is copied into buffers.
    Raises VersionError if the manager validates adapters in no way that we know.
    """
    name = next((name for name in _ADAPTER_CHECKS if hasattr(manager, name)), None)
    if name is None:
        raise VersionError(
            f"vLLM's {type(manager).__name__} has none of {', '.join(_ADAPTER_CHECKS)}, so LoRA "
            "adapters of a gac model cannot be checked; serve it without --enable-lora"
        )
    validate = getattr(manager, name)

    def fit_and_validate(adapter: "LoRAModel") -> None:
        fit(adapter)
        validate(adapter)

    setattr(manager, name, fit_and_validate)


# ---- linear layers in FP8 --------------------------------------------------------------------


def fp8_kernel_of(linear: Any) -> Any:
    """CUTLASS's kernel of a linear that vLLM quantizes to FP8 while loading, None for any other.

    Its `apply_scaled_mm` takes an input in FP8 with a scale for each token. vLLM's interface for
    inputs that are quantized already, `QuantizedActivation`, exists for this kernel only with a
    scale that is known beforehand.
    """
    import vllm.envs as envs
    from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.online.fp8 import (
        Fp8PerTensorOnlineLinearMethod,
        Fp8PtpcOnlineLinearMethod,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

    method = linear.quant_method
    if type(method) not in (Fp8PerTensorOnlineLinearMethod, Fp8PtpcOnlineLinearMethod):
        return None
    kernel = method.fp8_linear
    is_by_token = method.activation_quant_key == kFp8DynamicTokenSym
    if type(kernel) is not CutlassFP8ScaledMMLinearKernel or not is_by_token:
        return None
    return None if envs.VLLM_BATCH_INVARIANT else kernel

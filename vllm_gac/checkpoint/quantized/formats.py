"""The quantized formats that are read, by what config.json says, and the refusal of all others."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.quantized import compressed_tensors, eight_bits, gptq_awq
from vllm_gac.checkpoint.quantized.packing import FLOATS, PackedLinear, Packing, packed_linear
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout

# vLLM looks for the second key, an older name, where the first is missing.
KEYS = ("quantization_config", "compression_config")
# What LLM Compressor and ModelOpt name a layer's scales of queries, keys and values, which vLLM
# loads into the layer's attention.
CACHE_SCALE = re.compile(
    r"model\.layers\.(\d{1,9})\.self_attn\.(?:attn\.|[kv]_proj\.)?"
    r"([qkv]_scale|kv_scale|[qkv]_zero_point)"
)
_QUANTIZERS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "gguf": "GGUF",
}


class _Format(NamedTuple):
    """A format: its reader, and what leaves linear layers out of a section of config.json."""

    read: Callable[[Mapping[str, Any], str], Sequence[Packing]]
    without: Callable[[Mapping[str, Any], Sequence[str]], dict[str, Any]]


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "compressed-tensors": _Format(
            compressed_tensors.read_compressed_tensors, compressed_tensors.without_modules
        ),
        "fp8": _Format(eight_bits.read_fp8, eight_bits.without_modules),
        "gptq": _Format(gptq_awq.read_gptq, gptq_awq.without_gptq),
        "awq": _Format(gptq_awq.read_awq, gptq_awq.without_awq),
    }
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model is quantized, in a format that is read.

    Attributes:
        method: Its quantizer, as config.json names it.
        section: What config.json says of it.
        packings: The ways in which its linear layers may be stored.
    """

    method: str
    section: Mapping[str, Any]
    packings: Sequence[Packing]

    def packed(
        self, layout: ModelLayout, tensors: Mapping[str, TensorInfo], directory: Path
    ) -> dict[str, PackedLinear]:
        """The linear layers that are packed, by the names of their weights.

        Args:
            layout: The dims of the model.
            tensors: What the headers of its files say.
            directory: The model directory, for messages.
        """
        packed = {}
        for name, shape in layout.tensors().items():
            stored = tensors.get(name)
            is_linear = len(shape) == 2 and not name.endswith(("norm.weight", "tokens.weight"))
            if is_linear and name.endswith(".weight") and not (stored and stored.dtype in FLOATS):
                rows, columns = shape
                packed[name] = packed_linear(
                    self.packings, name, (rows, columns), tensors, directory
                )
        return packed

    def without(self, modules: Sequence[str]) -> dict[str, Any]:
        """What config.json says once the linear layers `modules` are in 16 bits.

        Scales of the KV cache are of other keys and values then, and are left out.
        """
        section = _FORMATS[self.method].without(self.section, modules)
        return section | ({"kv_cache_scheme": None} if "kv_cache_scheme" in section else {})


def quantization_of(config: Mapping[str, Any], directory: Path) -> Quantization | None:
    """How the model in `directory` is quantized; None if it is not.

    Raises CheckpointError, which names what says so, if it is in a format that is not read.
    """
    key = next((key for key in KEYS if config.get(key) is not None), KEYS[0])
    section, file = config.get(key), f"config.json: {key}"
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if section is None and (directory / "hf_quant_config.json").exists():
        file, method = "hf_quant_config.json", "modelopt"
    elif section is None:
        return None
    elif isinstance(section, Mapping) and isinstance(method, str) and method in _FORMATS:
        packings = _FORMATS[method].read(section, str(directory / file))
        return Quantization(method, section, packings)
    known = _QUANTIZERS.get(method) if isinstance(method, str) else None
    by = f" by {known}" if known else ""
    raise CheckpointError(
        f"{directory / file}: this model is quantized{by}, and vllm-gac reads packed tensors of "
        f"{', '.join(_FORMATS)} alone; start from the bf16 model that it was made from, or remove "
        "what says so if the weights were dequantized"
    )

"""The names that a pickled model may refer to, and what each of them stands for here.

A name that is not in these tables is refused. Nothing is imported: a class becomes a `Class`, and
the few functions that loading a file of torch.save calls are reimplemented below.
"""

import re
from typing import Any

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.pickles.values import (
    Class,
    Constructor,
    Dtype,
    Refused,
    Storage,
    StorageType,
    StoredTensor,
)

# Modules, with submodules, whose classes are all parts of models, configs or tokenizers.
_MODEL_MODULES = (
    "torch.nn.modules",
    "transformers.activations",
    "transformers.configuration_utils",
    "transformers.generation",
    "transformers.modeling_rope_utils",
    "transformers.models.llama",
    "transformers.models.mistral",
    "transformers.tokenization_python",
    "transformers.tokenization_utils",
    "transformers.tokenization_utils_base",
    "transformers.tokenization_utils_fast",
    "transformers.tokenization_utils_sentencepiece",
    "transformers.tokenization_utils_tokenizers",
    "tokenizers",
    "component.svd_llama",  # SVD-LLM
    "component.svd_mistral",
    "LLMPruner.models.hf_llama",
)
_CLASS_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_STORAGES = {
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_DTYPES = tuple(DTYPES[name].torch_name for name in _STORAGES.values())
_MAX_DIMS = 8  # of a tensor; attention masks have 4


def meaning(module: str, name: str) -> Any:
    """What `module.name` stands for here. Raises Refused if it is not part of a model."""
    known = _KNOWN.get((module, name))
    if known is not None:
        return known
    is_model = any(module == m or module.startswith(m + ".") for m in _MODEL_MODULES)
    if is_model and _CLASS_NAME.fullmatch(name):
        return Class(module, name)
    raise Refused(f"refers to {module}.{name}, which is not part of a model; not opened")


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, hooks: Any, *more: Any
) -> StoredTensor:
    """torch._utils._rebuild_tensor_v2"""
    if not isinstance(storage, Storage):
        raise Refused("has a tensor without a storage")
    tensor = StoredTensor(storage, _sizes(offset)[0], _sizes(*shape), _sizes(*stride))
    if len(tensor.shape) != len(tensor.stride) or len(tensor.shape) > _MAX_DIMS:
        raise Refused(f"has a tensor of shape {tensor.shape[:9]} and strides {tensor.stride[:9]}")
    if tensor.offset + tensor.span > storage.count:
        raise Refused(
            f"has a tensor of shape {list(tensor.shape)} that ends at number "
            f"{tensor.offset + tensor.span} of a storage of {storage.count}"
        )
    return tensor


def _sizes(*values: Any) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 48:
            raise Refused("has a tensor with invalid sizes")
    return values


def _parameter(tensor: Any, requires_grad: Any, hooks: Any, state: Any = None) -> StoredTensor:
    """torch._utils._rebuild_parameter, and _with_state, which adds attributes set by a tool."""
    if not isinstance(tensor, StoredTensor):
        raise Refused("has a parameter that is not a tensor")
    return tensor


def _encode(text: Any, encoding: Any) -> bytes:
    """_codecs.encode, which is how protocol 2 stores bytes."""
    if type(text) is not str or encoding != "latin1":
        raise Refused("calls _codecs.encode for something else than bytes")
    return text.encode("latin1")


def _ordered_dict(*pairs: Any) -> dict[Any, Any]:
    """collections.OrderedDict, whose items follow."""
    if pairs:
        raise Refused("makes an OrderedDict of something")
    return {}


def _set(items: Any = ()) -> set[Any]:
    if type(items) is not list:
        raise Refused("makes a set of something else than a list")
    return {hashable(item) for item in items}


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _size(sizes: Any) -> tuple[int, ...]:
    """torch.Size"""
    if type(sizes) is not tuple or len(sizes) > _MAX_DIMS:
        raise Refused("has an invalid torch.Size")
    return _sizes(*sizes)


def _device(kind: Any, index: Any = 0) -> str:
    """torch.device"""
    if type(kind) is not str or type(index) is not int:
        raise Refused("has an invalid torch.device")
    return kind


def hashable(key: Any) -> Any:
    """`key`, if it may be in a set or a dict.

    Integers beyond 64 bits and tuples of numbers can be made to collide, nested tuples to
    overflow the stack.
    """
    kind = type(key)
    if kind in (str, bytes, float, bool, type(None)):
        return key
    if kind is int and -(1 << 63) <= key < 1 << 64:
        return key
    if kind is tuple and all(type(part) is str for part in key):
        return key
    raise Refused(f"has a {kind.__name__} as a key")


_KNOWN: dict[tuple[str, str], Any] = {
    **{("torch", name): StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", name): Dtype(name) for name in _DTYPES},
    ("torch.nn.functional", "silu"): Class("torch.nn.functional", "silu"),
    **{
        (module, name): Constructor(f"{module}.{name}", make)
        for module, name, make in (
            ("torch._utils", "_rebuild_tensor_v2", _tensor),
            ("torch._utils", "_rebuild_parameter", _parameter),
            ("torch._utils", "_rebuild_parameter_with_state", _parameter),
            ("torch", "Size", _size),
            ("torch", "device", _device),
            ("collections", "OrderedDict", _ordered_dict),
            ("_codecs", "encode", _encode),
            ("builtins", "set", _set),
            ("builtins", "frozenset", _frozenset),
            ("__builtin__", "set", _set),  # their names in protocol 2
            ("__builtin__", "frozenset", _frozenset),
        )
    },
}

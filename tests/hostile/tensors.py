"""Valid files whose tensors do not match config.json."""

import struct
from collections.abc import Callable

from tests.hostile.case import Case, bad_tensors
from tests.support.model_files import Tensors, gac_config, reshaped, retyped, tensors_of

A, B = "model.layers.0.mlp.down_proj.A.weight", "model.layers.0.mlp.down_proj.B.weight"
BIAS = "model.layers.0.mlp.down_proj.B.bias"
DENSE = "model.layers.0.mlp.down_proj.weight"
TABLE = "model.layers.0.self_attn.rope_inv_freq"
UP = "model.layers.1.self_attn.k_up_proj.weight"
NORM = "model.norm.weight"

_NAN, _INFINITY = struct.pack("<H", 0x7FC1), struct.pack("<H", 0xFF80)


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def added(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: ("BF16", shape)})


def all_retyped(dtype: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({n: (dtype, shape) for n, (_, shape) in tensors.items()})


def emptied(tensors: Tensors) -> None:
    tensors.clear()


_SHAPES: dict[str, tuple[str, tuple[int, ...], str]] = {
    "A transposed": (A, (40, 8), "shape [40, 8], expected [8, 40]"),
    "B transposed": (B, (8, 32), "shape [8, 32], expected [32, 8]"),
    "another rank in A": (A, (16, 40), "shape [16, 40], expected [8, 40]"),
    "another rank in B": (B, (32, 16), "shape [32, 16], expected [32, 8]"),
    "flat": (A, (320,), "shape [320], expected [8, 40]"),
    "empty": (A, (0, 40), "shape [0, 40], expected [8, 40]"),
    "a scalar": (A, (), "shape [], expected [8, 40]"),
    "another vocabulary": ("lm_head.weight", (65, 32), "expected [64, 32]"),
    "one head's up-projection": (UP, (16, 8), "expected [2, 16, 8]"),
    "frequencies of 16": (TABLE, (2, 8), "expected [2, 6]"),
}
_DTYPES: dict[str, tuple[str, str, str]] = {
    "F16 among BF16": (A, "F16", "dtype F16, expected BF16"),
    "F32 among BF16": (A, "F32", "dtype F32, expected BF16"),
    "F64": (A, "F64", "dtype F64, expected BF16"),
    "I8": (A, "I8", "dtype I8, expected BF16"),
    "F8": (A, "F8_E4M3", "dtype F8_E4M3, expected BF16"),
    "F16 up-projection": (UP, "F16", "dtype F16, expected BF16"),
    "BF16 frequencies": (TABLE, "BF16", "BF16, expected F32"),
    "F16 norm": (NORM, "F16", "dtype F16, expected BF16 or F32"),
}
_FILLED = (A, B, UP, TABLE, NORM, "lm_head.weight", "model.embed_tokens.weight")


def not_finite(name: str, value: bytes) -> Case:
    """A model with a tensor that repeats a zero and a value that is not finite."""
    size = 4 if name == TABLE else 2
    filler = bytes(size) + struct.pack("<f", float("nan")) if name == TABLE else bytes(2) + value
    return bad_tensors(
        lambda tensors: None,
        "model.safetensors",
        name,
        "contains NaN or infinity",
        fill={name: filler},
    )


CASES: dict[str, Case] = {
    "no tensor at all": bad_tensors(emptied, "model.embed_tokens.weight", "missing"),
    **{f"no {n}": bad_tensors(without(n), n, "missing") for n in tensors_of(gac_config())},
    **{
        f"shape: {case}": bad_tensors(reshaped(name, *shape), "model.safetensors", name, why)
        for case, (name, shape, why) in _SHAPES.items()
    },
    **{
        f"dtype: {case}": bad_tensors(retyped(name, dtype), "model.safetensors", name, why)
        for case, (name, dtype, why) in _DTYPES.items()
    },
    "dtype: F64 throughout": bad_tensors(all_retyped("F64"), "model.safetensors", "dtype F64"),
    "A by another name": bad_tensors(renamed(A, A.replace(".A.", ".C.")), A, "missing"),
    "dense, too": bad_tensors(added(DENSE, 32, 40), DENSE, "not part of the model"),
    "a bias": bad_tensors(added(BIAS, 32), BIAS, "not part of the model"),
    "one layer more": bad_tensors(
        added("model.layers.2.input_layernorm.weight", 32), "layers.2", "not part of the model"
    ),
    "a name of a megabyte": bad_tensors(added("x" * (1 << 20), 1), "not part of the model"),
    "a name that steers terminals": bad_tensors(
        added("\x1b[2J\nok: 21 tensors", 1), "not part of the model"
    ),
    **{f"NaN in {name}": not_finite(name, _NAN) for name in _FILLED},
    **{f"infinity in {name}": not_finite(name, _INFINITY) for name in _FILLED},
}

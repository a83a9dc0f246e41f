"""Models that are read, also unusual ones, and models that are refused."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_files import (
    Tensors,
    config,
    gac_config,
    refusal,
    reshaped,
    retyped,
    tensors_of,
    write_model,
)
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of

A, B = "model.layers.0.mlp.down_proj.A.weight", "model.layers.0.mlp.down_proj.B.weight"
DENSE = "model.layers.0.mlp.down_proj.weight"
ATTENTION = "model.layers.0.self_attn"
TABLE = f"{ATTENTION}.rope_inv_freq"


@pytest.mark.parametrize("raw", [config(), gac_config()], ids=["dense", "gac"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_valid_model_has_no_faults(
    raw: dict[str, Any], shards: int, dtype: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", raw, shards=shards, dtype=dtype)
    checkpoint = open_checkpoint(directory)
    assert list(all_faults(checkpoint)) == []
    assert checkpoint.tensors.keys() == tensors_of(raw).keys()


# ---- config.json; tests/layout/test_schema.py has those that are refused -----------------------

ODD_VALUES = (None, True, 0, -1, 7, 2**64, 1e-320, 1e300, "", "8", [], [1], {}, {"a": 1}, [[[]]])


def parts_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value."""
    yield path
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for key, part in parts.items() if isinstance(parts, dict) else ():
        yield from parts_of(part, (*path, key))


@pytest.mark.parametrize(
    "raw", [config(rope_parameters={"rope_theta": 1e4}), gac_config()], ids=["dense", "gac"]
)
def test_any_config_value_is_read_or_refused(raw: dict[str, Any]) -> None:
    for *path, last in filter(None, parts_of(raw)):
        for odd in ODD_VALUES:
            edited = json.loads(json.dumps(raw))
            part = edited
            for key in path:
                part = part[key]
            part[last] = odd
            try:
                layout = layout_of(edited)
            except CheckpointError as e:
                assert str(e).startswith("config.json: ")  # noqa: PT017
            else:
                assert layout.parameters > 0


# ---- tensors -----------------------------------------------------------------------------------


def test_a_tensor_that_is_wrong_in_every_way_yields_every_fault(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[A] = ("F16", (8, 41))
        tensors.pop(B)
        tensors["surplus"] = ("BF16", (1,))

    write_model(tmp_path, gac_config(), change)
    assert len(refusal(tmp_path).splitlines()) == 4


def added(name: str, dtype: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: (dtype, shape)})


def all_retyped(dtype: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({n: (dtype, shape) for n, (_, shape) in tensors.items()})


# By case: what is changed, and what the message names beside the file.
WRONG: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "transposed": (reshaped(A, 40, 8), (A, "[40, 8]", "[8, 40]")),
    "another rank": (reshaped(B, 32, 16), (B, "[32, 16]", "[32, 8]")),
    "flat": (reshaped(A, 320), (A, "[320]", "[8, 40]")),
    "no rows": (reshaped(A, 0, 40), (A, "[0, 40]", "[8, 40]")),
    "a scalar": (reshaped(A), (A, "[]", "[8, 40]")),
    "another vocabulary": (reshaped("lm_head.weight", 65, 32), ("lm_head.weight", "[64, 32]")),
    "F16 among BF16": (retyped(A, "F16"), (A, "F16", "BF16")),
    "F32 among BF16": (retyped(A, "F32"), (A, "F32", "BF16")),
    "F8": (retyped(A, "F8_E4M3"), (A, "F8_E4M3")),
    "F64 throughout": (all_retyped("F64"), ("F64",)),
    "a table in BF16": (retyped(TABLE, "BF16"), (TABLE, "F32")),
    "an F16 norm": (retyped("model.norm.weight", "F16"), ("model.norm.weight", "F16")),
    "a dense tensor besides": (
        added(DENSE, "BF16", 32, 40),
        (DENSE, "not part of the model"),
    ),
    "an adapter's tensor": (
        added(f"{A}.lora_A.weight", "BF16", 1),
        (f"{A}.lora_A.weight", "merge"),
    ),
    "a quantizer's tensor": (
        added(f"{A}_scale", "BF16", 1),
        (f"{A}_scale", "16-bit"),
    ),
    "a layer too many": (
        added("model.layers.2.norm.weight", "BF16", 32),
        ("model.layers.2.norm.weight", "num_hidden_layers", "2"),
    ),
    "a name that clears the screen": (
        added("\x1b[2J\nok", "BF16", 1),
        (r"\x1b[2J\nok",),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_does_not_fit_the_layout_is_named(case: str, tmp_path: Path) -> None:
    change, named = WRONG[case]
    write_model(tmp_path, gac_config(), change)
    said = refusal(tmp_path)
    assert all(name in said for name in ("model.safetensors", *named)), said


@pytest.mark.parametrize("name", tensors_of(gac_config()))
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, gac_config(), lambda tensors: tensors.pop(name))
    assert f"{name}: missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    "prefixed",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: name.replace("model.", "model.language_model."),
        lambda name: name.removeprefix("model."),
    ],
)
def test_another_name_prefix_is_one_fault(prefixed: Callable[[str], str], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        renamed = {prefixed(name): info for name, info in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    write_model(tmp_path, config(), change)
    (said,) = refusal(tmp_path).splitlines()
    assert prefixed("model.embed_tokens.weight") in said


def test_a_missing_or_untied_head_is_refused(tmp_path: Path) -> None:
    head = "lm_head.weight"
    write_model(tmp_path / "untied", config(), lambda tensors: tensors.pop(head))
    assert "tie_word_embeddings" in refusal(tmp_path / "untied")
    for fill, dtype in (({head: b"\1\1"}, "BF16"), ({}, "F32")):
        directory = write_model(
            tmp_path / dtype,
            config(tie_word_embeddings=True),
            lambda tensors, dtype=dtype: tensors.update({head: (dtype, (64, 32))}),
            fill=fill,
        )
        assert f"model.safetensors: {head}: " in refusal(directory)


# ---- what must not be refused ----------------------------------------------------------------


TIED = config(tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("raw", "change"),
    [
        pytest.param(TIED, added("lm_head.weight", "BF16", 64, 32), id="a tied head"),
        pytest.param(config(), added(f"{ATTENTION}.rotary_emb.inv_freq", "F32", 8), id="RoPE"),
        pytest.param(config(), retyped("model.norm.weight", "F32"), id="a norm in F32"),
        pytest.param(gac_config(), reshaped(TABLE, 1, 6), id="one table for all heads"),
        pytest.param(config(auto_map={"AutoModel": "evil.Model"}), dict, id="remote code"),
    ],
)
def test_harmless_additions_are_accepted(
    raw: dict[str, Any], change: Callable[[Tensors], object], tmp_path: Path
) -> None:
    write_model(tmp_path, raw, change)
    (tmp_path / "evil.py").write_text("raise SystemExit(1)")
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_a_tensor_that_is_asked_for_and_missing_is_named(tmp_path: Path) -> None:
    with (
        open_checkpoint(write_model(tmp_path, config())).reader() as read,
        pytest.raises(CheckpointError, match="nothing"),
    ):
        read("nothing")

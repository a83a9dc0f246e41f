"""Models that are read, also unusual ones. Models that are refused are in tests/hostile."""

import json
from collections.abc import Iterator
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
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of

A, B = "model.layers.0.mlp.down_proj.A.weight", "model.layers.0.mlp.down_proj.B.weight"
TABLE = "model.layers.0.self_attn.rope_inv_freq"


@pytest.mark.parametrize("raw", [config(), gac_config()], ids=["dense", "gac"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_sound_model_has_no_faults(
    raw: dict[str, Any], shards: int, dtype: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", raw, shards=shards, dtype=dtype)
    checkpoint = open_checkpoint(directory)
    assert list(faults(checkpoint, finite=True)) == []
    assert checkpoint.tensors.keys() == tensors_of(raw).keys()


# ---- config.json; tests/hostile/configs.py has those that are refused ------------------------

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
def test_whatever_stands_in_a_config_is_read_or_refused(raw: dict[str, Any]) -> None:
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


# ---- what must not be refused ----------------------------------------------------------------


def test_what_every_engine_skips_is_no_fault(tmp_path: Path) -> None:
    raw = config(tie_word_embeddings=True)

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,))

    write_model(tmp_path, raw, change)
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_norms_in_f32_beside_16_bit_weights_are_no_fault(tmp_path: Path) -> None:
    write_model(tmp_path, config(), retyped("model.norm.weight", "F32"))
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_frequencies_that_all_heads_share_may_be_stored_once(tmp_path: Path) -> None:
    write_model(tmp_path, gac_config(), reshaped(TABLE, 1, 6))
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_remote_code_and_unknown_keys_of_a_config_are_ignored(tmp_path: Path) -> None:
    raw = config(auto_map={"AutoModel": "evil.Model"}, pretraining_tp=1)
    write_model(tmp_path, raw)
    (tmp_path / "evil.py").write_text("raise SystemExit(1)")
    assert list(faults(open_checkpoint(tmp_path))) == []


def test_a_tensor_that_is_asked_for_and_missing_is_named(tmp_path: Path) -> None:
    with (
        open_checkpoint(write_model(tmp_path, config())).reader() as read,
        pytest.raises(CheckpointError, match="nothing is missing"),
    ):
        read("nothing")

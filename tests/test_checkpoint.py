"""A broken or hostile model is refused with one sentence that names file and key or tensor."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_files import (
    GAC_LAYERS,
    Tensors,
    config,
    gac_config,
    refusal,
    reshaped,
    tensors_of,
    write_model,
)
from vllm_gac.checkpoint import faults, open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.layout import layout_of

A, B = "model.layers.0.mlp.down_proj.A.weight", "model.layers.0.mlp.down_proj.B.weight"
BIAS = "model.layers.0.mlp.down_proj.B.bias"
DENSE = "model.layers.0.mlp.down_proj.weight"
TABLE = "model.layers.0.self_attn.rope_inv_freq"
UP = "model.layers.1.self_attn.k_up_proj.weight"


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


# ---- config.json -----------------------------------------------------------------------------


def changed(section: Callable[[list[dict[str, Any]]], object]) -> dict[str, Any]:
    """A gac config whose layers were changed."""
    raw: dict[str, Any] = json.loads(json.dumps(gac_config()))
    section(raw["gac"]["layers"])
    return raw


def with_rank(rank: Any) -> dict[str, Any]:
    return changed(lambda layers: layers[0]["ranks"].update({"mlp.down_proj": rank}))


def with_key(**key: Any) -> dict[str, Any]:
    return changed(lambda layers: layers[0]["key"].update(key))


BAD_CONFIGS: dict[str, tuple[Any, str]] = {
    "layer missing": (changed(lambda layers: layers.pop()), "gac.layers has 1 layers"),
    "layer too many": (changed(lambda layers: layers.append(layers[0])), "gac.layers has 3"),
    "no layers": (gac_config(layers=[]), "gac.layers"),
    "layers not a list": (gac_config(layers={"0": GAC_LAYERS[0]}), "gac.layers"),
    "layer not an object": (gac_config(layers=[1, 2]), "gac.layers.0"),
    "rank 0": (with_rank(0), "gac.layers.0.ranks.mlp.down_proj"),
    "rank negative": (with_rank(-8), "gac.layers.0.ranks.mlp.down_proj"),
    "rank true": (with_rank(True), "gac.layers.0.ranks.mlp.down_proj"),
    "rank 8.0": (with_rank(8.0), "gac.layers.0.ranks.mlp.down_proj"),
    "rank '8'": (with_rank("8"), "gac.layers.0.ranks.mlp.down_proj"),
    "rank null": (with_rank(None), "gac.layers.0.ranks.mlp.down_proj"),
    "rank 2**63": (with_rank(2**63), "gac.layers.0.ranks.mlp.down_proj"),
    "rank 10**400": (with_rank(10**400), "gac.layers.0.ranks.mlp.down_proj"),
    "rank above full": (with_rank(33), "rank 33 exceeds the full rank 32"),
    "rank of no linear": (
        changed(lambda layers: layers[0].update(ranks={"mlp.gate": 8})),
        "gac.layers.0.ranks.mlp.gate",
    ),
    "unknown layer key": (changed(lambda layers: layers[0].update(rank={})), "gac.layers.0.rank"),
    "unknown key form": (with_key(form="absolute"), "gac.layers.0.key.form"),
    "key size odd": (with_key(size=11), "odd 11"),
    "key size 0": (with_key(size=0), "gac.layers.0.key.size"),
    "key size bomb": (with_key(size=10**9), "gac.layers.0.key.size"),
    "key heads do not divide": (with_key(heads=3), "gac.layers.0.key.heads: 3 does not divide 4"),
    "value heads do not divide": (
        changed(lambda layers: layers[0]["value"].update(heads=3)),
        "gac.layers.0.value.heads: 3 does not divide 2",
    ),
    "no RoPE frequencies": (
        changed(lambda layers: layers[0].update(rope_table=False)),
        "gac.layers.0.rope_table",
    ),
    "rope_table 1": (changed(lambda layers: layers[0].update(rope_table=1)), "rope_table"),
    "width bomb": (
        changed(lambda layers: layers[0].update(intermediate_size=10**9)),
        "gac.layers.0.intermediate_size",
    ),
    "version 2": (gac_config() | {"gac": gac_config()["gac"] | {"version": 2}}, "format version 1"),
    "version true": (gac_config() | {"gac": gac_config()["gac"] | {"version": True}}, "version"),
    "no version": (config(gac={"softmax_scale": 0.25, "layers": GAC_LAYERS}), "gac.version"),
    "softmax scale tiny": (
        gac_config() | {"gac": gac_config()["gac"] | {"softmax_scale": 1e-300}},
        "softmax_scale",
    ),
    "no head size": (
        gac_config()
        | {"gac": {"version": 1, "softmax_scale": 900.0, "layers": GAC_LAYERS}},
        "gac.head_dim",
    ),
    "gac is a list": (gac_config() | {"gac": []}, "gac"),
    "gac under a dense name": (gac_config() | {"architectures": ["LlamaForCausalLM"]}, "gac"),
    "dense under gac's name": (config(architectures=["GacLlamaForCausalLM"]), "gac"),
    "hidden size bomb": (config(hidden_size=10**9), "hidden_size"),
    "layers bomb": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "vocabulary bomb": (config(vocab_size=2**62), "vocab_size"),
    "heads bomb": (config(num_attention_heads=10**9, num_key_value_heads=1), "num_attention_heads"),
    "head size bomb": (config(head_dim=10**9), "head_dim"),
    "hidden size 32.0": (config(hidden_size=32.0), "hidden_size"),
    "hidden size '32'": (config(hidden_size="32"), "hidden_size"),
    "hidden size true": (config(hidden_size=True), "hidden_size"),
    "no hidden size": ({k: v for k, v in config().items() if k != "hidden_size"}, "hidden_size"),
    "KV heads do not divide": (config(num_key_value_heads=3), "num_key_value_heads"),
    "heads 0": (config(num_attention_heads=0), "num_attention_heads"),
    "head size odd": (config(head_dim=15), "odd 15"),
    "GPT-2": (config(model_type="gpt2"), "model_type"),
    "another architecture": (config(architectures=["LlamaForQuestionAnswering"]), "architectures"),
    "PaLU": (config(model_type="palullama", head_wise_ranks={}), "model_type"),
    "activation": (config(hidden_act="gelu"), "hidden_act"),
    "tied 'yes'": (config(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "tied 1": (config(tie_word_embeddings=1), "tie_word_embeddings"),
    "bias 0": (config(attention_bias=0), "attention_bias"),
    "epsilon negative": (config(rms_norm_eps=-1e-5), "rms_norm_eps"),
    "yarn": (config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope"),
    "RoPE a string": (config(rope_scaling="linear"), "rope"),
    "RoPE by layer type": (config(rope_parameters={"full_attention": {}}), "layer type"),
    "llama3 RoPE incomplete": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "llama3 RoPE needs high_freq_factor, low_freq_factor, original_max_position_embeddings",
    ),
    "partial rotation": (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "theta bomb": (config(rope_theta=10**400), "rope_theta"),
    "window '4096'": (config(model_type="mistral", sliding_window="4096"), "sliding_window"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused_naming_file_and_key(case: str, tmp_path: Path) -> None:
    raw, expected = BAD_CONFIGS[case]
    write_model(tmp_path, config())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    sentence = refusal(tmp_path)
    assert expected in sentence
    assert str(tmp_path / "config.json") in sentence
    assert len(sentence) < 500


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


BAD_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "a list": (b"[]", "expected a JSON object, got list"),
    "null": (b"null", "expected a JSON object"),
    "torn": (json.dumps(config()).encode()[:-9], "not valid JSON"),
    "more after the end": (json.dumps(config()).encode() + b"{}", "not valid JSON"),
    "duplicate keys": (b'{"hidden_size": 32, "hidden_size": 64}', "'hidden_size' appears twice"),
    "NaN": (b'{"rms_norm_eps": NaN}', "NaN is not JSON"),
    "infinity": (b'{"rope_theta": -Infinity}', "-Infinity is not JSON"),
    "1e999": (b'{"rope_theta": 1e999}', "1e999 is too large"),
    "5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "deep nesting": (b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deeply"),
    "deep nesting of objects": (b'{"a":' * 10**5 + b"1" + b"}" * 10**5, "nested too deeply"),
    "latin-1": (b'{"name": "caf\xe9"}', "not UTF-8 text (byte 13)"),
    "UTF-16": (json.dumps(config()).encode("utf-16"), "not UTF-8"),
    "too large": (b'{"a": "' + b"x" * (4 << 20) + b'"}', "larger than 4194304 bytes"),
    "many lists": (b'{"a": [' + b"[]," * (1 << 20) + b"[]]}", "model_type"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_json_is_refused_naming_the_file(case: str, tmp_path: Path) -> None:
    text, expected = BAD_JSON[case]
    write_model(tmp_path, config())
    (tmp_path / "config.json").write_bytes(text)
    sentence = refusal(tmp_path)
    assert expected in sentence
    assert str(tmp_path / "config.json") in sentence


# ---- tensors -----------------------------------------------------------------------------------


def retyped(name: str, dtype: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: (dtype, tensors[name][1])})


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def cases_for_every_tensor() -> Iterator[Any]:
    for name in tensors_of(gac_config()):
        yield pytest.param(lambda t, n=name: t.pop(n), name, "missing", id=f"no {name}")


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        *cases_for_every_tensor(),
        pytest.param(reshaped(A, 40, 8), A, "shape [40, 8], expected [8, 40]", id="A transposed"),
        pytest.param(reshaped(B, 8, 32), B, "shape [8, 32], expected [32, 8]", id="B transposed"),
        pytest.param(reshaped(A, 16, 40), A, "shape [16, 40], expected [8, 40]", id="other rank"),
        pytest.param(reshaped(A, 320), A, "shape [320], expected [8, 40]", id="flat"),
        pytest.param(reshaped(A, 0, 40), A, "shape [0, 40], expected [8, 40]", id="empty"),
        pytest.param(reshaped(A), A, "shape [], expected [8, 40]", id="a scalar"),
        pytest.param(reshaped(UP, 16, 8), UP, "expected [2, 16, 8]", id="one head's up-projection"),
        pytest.param(reshaped(TABLE, 2, 8), TABLE, "expected [2, 6]", id="frequencies of 16"),
        pytest.param(renamed(A, A.replace(".A.", ".C.")), A, "missing", id="A by another name"),
        pytest.param(
            lambda t: t.update({DENSE: ("BF16", (32, 40))}), DENSE, "not part", id="dense, too"
        ),
        pytest.param(
            lambda t: t.update({BIAS: ("BF16", (32,))}), BIAS, "not part", id="a bias"
        ),
        pytest.param(retyped(A, "F16"), A, "dtype F16, expected BF16", id="F16 among BF16"),
        pytest.param(retyped(A, "F32"), A, "dtype F32, expected BF16", id="F32 among BF16"),
        pytest.param(retyped(A, "F64"), A, "dtype F64, expected BF16", id="F64"),
        pytest.param(retyped(A, "I8"), A, "dtype I8, expected BF16", id="I8"),
        pytest.param(retyped(A, "F8_E4M3"), A, "dtype F8_E4M3, expected BF16", id="F8"),
        pytest.param(retyped(UP, "F16"), UP, "dtype F16, expected BF16", id="F16 up-projection"),
        pytest.param(retyped(TABLE, "BF16"), TABLE, "BF16, expected F32", id="BF16 frequencies"),
        pytest.param(
            retyped("model.norm.weight", "F16"),
            "model.norm.weight",
            "dtype F16, expected BF16 or F32",
            id="F16 norm",
        ),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(
    change: Callable[[Tensors], object], name: str, why: str, tmp_path: Path
) -> None:
    write_model(tmp_path, gac_config(), change)
    sentence = refusal(tmp_path)
    assert any(f"{name}: " in line and why in line for line in sentence.splitlines()), sentence
    assert str(tmp_path) in sentence


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


def test_a_quantized_model_is_not_judged(tmp_path: Path) -> None:
    write_model(tmp_path, config(quantization_config={"quant_method": "awq"}))
    assert "quantization_config: tensors that a quantizer packed" in refusal(tmp_path)


def test_a_tensor_that_is_asked_for_and_missing_is_named(tmp_path: Path) -> None:
    with (
        open_checkpoint(write_model(tmp_path, config())).reader() as read,
        pytest.raises(CheckpointError, match="nothing is missing"),
    ):
        read("nothing")

"""Pickles of SVD-LLM and LLM-Pruner: the imported model computes the same function."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.pickles import foreign
from tests.checkpoint.pickles.archives import write as write_archive
from tests.checkpoint.pickles.bombs import LIVE
from tests.importers.pickled_models import llm_pruner, saved, svd_llm, transformers_llama
from tests.support.command import error, result, usage
from tests.support.dense_models import config as dense_config
from tests.support.dense_models import write as write_dense
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.pickles.torch_file import open_torch_file
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.importers.pickled_companions import pickled_companions
from vllm_gac.importers.pickled_model import open_pickled_model

TOKENS = torch.arange(2 * 40).view(2, 40) * 37 % 128
CASES = {
    "svd-llm": lambda: svd_llm(),
    "svd-llm, Mistral with grouped queries": lambda: svd_llm(mistral=True),
    "svd-llm, some linears whole": lambda: svd_llm(whole=("k", "down")),
    "svd-llm, odd ranks": lambda: svd_llm(ratio=0.37),
    "llm-pruner, every layer another": lambda: llm_pruner(
        [foreign.dims(), foreign.dims(heads=3, kv_heads=3, width=61)]
    ),
    "llm-pruner, hidden size": lambda: llm_pruner([foreign.dims(hidden=40)] * 2, hidden_size=40),
    "llm-pruner, fewer layers": lambda: llm_pruner([foreign.dims()], num_hidden_layers=2),
    "llm-pruner, grouped queries": lambda: transformers_llama(
        [foreign.dims(heads=4, kv_heads=2), foreign.dims(heads=2, kv_heads=1, width=64)]
    ),
}


def expected_logits(model: nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """The logits of the original model in fp32, with RoPE as before the conversion to fp16."""
    wide = copy.deepcopy(model).float()
    for module in wide.modules():
        if isinstance(module, foreign.LlamaRotaryEmbedding):
            module.__init__(2 * len(module.inv_freq), wide.config.rope_theta)
    with torch.inference_mode():
        return wide(tokens)


def logits_of(directory: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(directory)
    with torch.inference_mode(), checkpoint.reader() as read:
        return logits(reference(checkpoint), read, TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_the_function_is_the_same(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = CASES[case](), tmp_path / "out"
    done = result(capsys, "import", saved(tmp_path, model), out, "--quiet")
    checkpoint = open_checkpoint(out)
    assert (
        done["format"] == case.partition(",")[0] == checkpoint.raw_config["gac"]["source"]["format"]
    )
    assert done["parameters"] == checkpoint.layout.parameters
    assert done["tokenizer"]
    expected = expected_logits(model)
    difference = (logits_of(out) - expected).norm() / expected.norm()
    assert difference < 1e-4
    assert expected.std() > 0.1


def test_svd_llm_is_stored_by_its_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = svd_llm(mistral=True), tmp_path / "out"
    done = result(capsys, "import", saved(tmp_path, model), out, "--quiet")
    assert done["dtype"] == "float32"
    ranks = open_checkpoint(out).layout.layers[0].ranks
    assert ranks["self_attn.q_proj"] == int(48 * 48 * 0.8 / 96) == 19
    assert ranks["self_attn.k_proj"] == int(48 * 24 * 0.8 / 72) == 12  # the attribute says 19
    assert ranks["mlp.down_proj"] == int(48 * 96 * 0.8 / 144) == 25
    assert {info.dtype for info in open_checkpoint(out).tensors.values()} == {"F32"}
    raw = json.loads((out / "config.json").read_text())
    assert (raw["model_type"], raw["dtype"], raw["rope_theta"]) == ("mistral", "float32", 1e6)
    assert "torch_dtype" not in raw


def test_factors_that_save_nothing_are_multiplied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = svd_llm(ratio=1.2), tmp_path / "out"
    result(capsys, "import", saved(tmp_path, model), out, "--quiet")
    assert not open_checkpoint(out).layout.layers[0].ranks
    torch.testing.assert_close(logits_of(out), expected_logits(model), rtol=1e-3, atol=1e-3)


def test_llm_pruner_keeps_its_type_and_its_head_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    result(capsys, "import", saved(tmp_path, CASES["llm-pruner, hidden size"]()), out, "--quiet")
    checkpoint = open_checkpoint(out)
    assert {info.dtype for info in checkpoint.tensors.values()} == {"F16"}
    assert (checkpoint.layout.hidden_size, checkpoint.layout.head_dim) == (40, 12)


@pytest.mark.parametrize(
    "name",
    [
        "jeffwan_llama_7b_hf_whitening_only_0.8.pt",
        "jeffwan_llama_7b_hf_whitening_then_update_0.8.pt",
        "jeffwan_llama_7b_hf_update_only_0.8.pt",
        "merge.pt",
        "pytorch_model.bin",
    ],
)
def test_any_name_and_both_formats_of_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    for legacy in (False, True):
        file = saved(tmp_path / "src", svd_llm(), name, _use_new_zipfile_serialization=not legacy)
        out = tmp_path / f"out {legacy}"
        source = file if legacy else file.parent
        assert result(capsys, "import", source, out, "--quiet")["format"] == "svd-llm"


def test_what_was_pickled_beside_the_weights_becomes_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = svd_llm()
    model.generation_config = foreign.at(
        "transformers.generation.configuration_utils", foreign.Plain, "GenerationConfig"
    )(eos_token_id=[2, 3], temperature=0.6, top_k=None, max_length=20)
    result(capsys, "import", saved(tmp_path, model), tmp_path / "out", "--quiet")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"pieces"
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "model_max_length": 1000000000000000019884624838656,
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [2, 3],
        "temperature": 0.6,
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama-7b-hf, converted by vllm-gac" in card
    assert "from svd-llm" in card
    assert "- m.pt, " in card


def test_a_real_tokenizer_survives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    dense = write_dense(tmp_path / "dense", dense_config())
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        dense, chat_template="{{ messages }}", eos_token="a"
    )
    torch.save(tokenizer, tmp_path / "tokenizer.pt")  # real classes, in their real modules
    pickled = open_torch_file(tmp_path / "tokenizer.pt").root
    model = replace(open_pickled_model(saved(tmp_path, svd_llm())), tokenizer=pickled)
    (tmp_path / "again").mkdir()
    for name, contents in pickled_companions(model).items():
        (tmp_path / "again" / name).write_bytes(contents)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again.encode("hello world") == tokenizer.encode("hello world")
    assert again.chat_template == "{{ messages }}"
    assert again.eos_token == "a"


def test_the_base_model_gives_config_and_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = svd_llm()
    expected = expected_logits(model)
    model.config = foreign.at(
        "transformers.configuration_utils", foreign.Plain, "PretrainedConfig"
    )(nothing=1)
    base = write_dense(
        tmp_path / "base",
        dense_config(num_key_value_heads=4, head_dim=12),
    )
    file, out = saved(tmp_path, model), tmp_path / "out"
    assert "its config is PretrainedConfig, expected LlamaConfig" in error(
        capsys, "import", file, out
    )
    result(capsys, "import", file, out, "--base", base, "--quiet")
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (out / "tokenizer.model").exists()
    torch.testing.assert_close(logits_of(out), expected, rtol=1e-3, atol=1e-3)


def test_another_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = svd_llm()
    file = saved(tmp_path, model)
    result(capsys, "import", file, tmp_path / "out", "--dtype", "bfloat16", "--quiet")
    assert {i.dtype for i in open_checkpoint(tmp_path / "out").tensors.values()} == {"BF16"}
    model.model.layers[1].mlp.up_u_proj.weight.data[0, 0] = 1e6
    file = saved(tmp_path, model)
    said = error(capsys, "import", file, tmp_path / "half", "--dtype", "float16", "--quiet")
    assert said == (
        f"{file}: model.layers.1.mlp.up_u_proj.weight: too large for float16; give another --dtype"
    )


def broken(change: Any) -> nn.Module:
    model = svd_llm()
    change(model)
    return model


def set_weight(path: str, value: torch.Tensor) -> Any:
    return lambda model: setattr(model.get_submodule(path), "weight", nn.Parameter(value))


def nan(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_u_proj.weight.data[3, 1] = torch.nan


REFUSED: dict[str, tuple[Any, str]] = {
    "a factor is missing": (
        lambda m: delattr(m.model.layers[0].self_attn, "k_v_proj"),
        "model.layers.0.self_attn.k_v_proj.weight: missing",
    ),
    "factors of two ranks": (
        set_weight("model.layers.0.self_attn.q_v_proj", torch.ones(7, 48)),
        "q_u_proj.weight: shape [48, 19], expected [48, 7]",
    ),
    "a factor that is a vector": (
        set_weight("model.layers.0.self_attn.q_v_proj", torch.ones(48)),
        "q_v_proj.weight: shape [48], expected a matrix",
    ),
    "factors of another width": (
        set_weight("model.layers.1.mlp.gate_u_proj", torch.ones(95, 25)),
        "gate_u_proj.weight: shape [95, 25], expected [96, 25]",
    ),
    "a layer that is not there": (
        lambda m: setattr(m.model, "layers", nn.ModuleDict({"1": m.model.layers[1]})),
        "model.layers.0",
    ),
    "a linear that no Llama has": (
        lambda m: setattr(m.model.layers[0].mlp, "lora_A", foreign.linear(2, 2)),
        "model.layers.0.mlp.lora_A.weight: not part of the model",
    ),
    "integers": (
        lambda m: (
            m.model.layers[0]
            .mlp.up_u_proj.__dict__["_parameters"]
            .update(weight=nn.Parameter(torch.ones(96, 25, dtype=torch.int64), requires_grad=False))
        ),
        "up_u_proj.weight: dtype I64, expected",
    ),
    "NaN": (nan, "model.layers.0.mlp.up_u_proj.weight: contains NaN or infinity"),
    "an activation that is none of ours": (
        lambda m: setattr(m.config, "hidden_act", "gelu"),
        "config: hidden_act: Input should be 'silu', got 'gelu'",
    ),
    "RoPE that is none of ours": (
        lambda m: setattr(m.config, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        "rope_type",
    ),
    "a config value that is no JSON": (
        lambda m: setattr(m.config, "eos_token_id", torch.ones(1)),
        "config.eos_token_id: StoredTensor cannot be in a config.json",
    ),
    "a config value that is not finite": (
        lambda m: setattr(m.config, "initializer_range", float("nan")),
        "config.initializer_range: float cannot be in a config.json",
    ),
    "a quantized model": (
        lambda m: setattr(m.config, "quantization_config", {"load_in_8bit": True}),
        "quantization_config: this model is quantized, and vllm-gac cannot",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_model_is_one_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = REFUSED[case]
    file = saved(tmp_path, broken(change))
    assert said in error(capsys, "import", file, tmp_path / "out", "--quiet")
    assert not (tmp_path / "out").exists()


def test_there_must_be_something_to_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = tmp_path / "out", tmp_path / "src"
    source.mkdir()
    dense = saved(source, llm_pruner([foreign.dims()] * 2))
    assert "a dense model, from which nothing was pruned" in error(capsys, "import", dense, out)
    saved(source, svd_llm(), "other.bin")
    assert "holds 2 pickles (m.pt, other.bin...); name one" in error(capsys, "import", source, out)
    model = write_dense(tmp_path / "dense", dense_config())
    assert error(capsys, "import", model, out) == (
        f"{model}: a dense model: nothing to convert, it is served as it is"
    )
    assert "is in the format svd-llm, not llm-pruner" in error(
        capsys, "import", source / "other.bin", out, "--format", "llm-pruner"
    )
    (tmp_path / "there").mkdir()
    assert "exists; remove it or choose another" in error(
        capsys, "import", source / "other.bin", tmp_path / "there"
    )
    assert "no: there is no such directory; give a model directory" in error(
        capsys, "import", tmp_path / "no", tmp_path / "x"
    )
    assert "no: there is no such directory" in error(
        capsys, "import", source / "other.bin", tmp_path / "x", "--base", tmp_path / "no"
    )


def test_a_bomb_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    canary, file = tmp_path / "canary", tmp_path / "model.pt"
    bomb, _ = LIVE["os.system"]
    write_archive(file, "zip", bomb(canary))
    assert error(capsys, "import", file, tmp_path / "out") == (
        f"{file}: refers to os.system, which is not part of a model; not opened"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt"}


def test_an_unknown_format_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    said = usage(capsys, "import", "a", "b", "--format", "onnx")
    assert "--format onnx: expected one of auto, asvd, block-configs" in said

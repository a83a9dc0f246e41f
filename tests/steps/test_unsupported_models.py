"""Each verb refuses models that are no Llama or Mistral in unquantized safetensors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import error
from tests.support.model_files import config, write_model
from vllm_gac.cli import main

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 16060556376\n"


def bare(directory: Path, **files: str) -> Path:
    directory.mkdir()
    for name, contents in files.items():
        (directory / name.replace("__", ".")).write_text(contents)
    return directory


def family(**changes: object) -> Callable[[Path], Path]:
    return lambda path: write_config(path, changes)


def write_config(path: Path, changes: dict[str, object], weights: bool = True) -> Path:
    if weights:
        write_model(path, config())
    (path / "config.json").write_text(json.dumps(config(**changes)))
    return path


def quantized(**section: object) -> Callable[[Path], Path]:
    return family(quantization_config=section)


def modelopt(path: Path) -> Path:
    (write_model(path, config()) / "hf_quant_config.json").write_text("{}")
    return path


def adapter_with_config(path: Path) -> Path:
    bare(path, config__json=json.dumps(config()), adapter_config__json="{}")
    (path / "adapter_model.safetensors").write_text("")
    return path


def gguf_file(path: Path) -> Path:
    return bare(path, **{"m__gguf": "GGUF"}) / "m.gguf"


def cache_folder(path: Path) -> Path:
    (path / "snapshots" / "abc").mkdir(parents=True)
    return path


def consolidated(path: Path) -> Path:
    bare(path, params__json="{}")
    (path / "consolidated.safetensors").write_bytes(b"whatever")
    return path


def pointer_as(name: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        write_model(path, config())
        (path / name).write_text(POINTER)
        return path

    return write


# By case: the model, and what the message names.
UNSUPPORTED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Qwen2.5-VL": (family(model_type="qwen2_5_vl", vision_config={"depth": 32}), "qwen2_5_vl"),
    "Gemma": (
        family(model_type="gemma3_text", rope_parameters={"full_attention": {}}), "gemma3_text",
    ),
    "GPTQ": (quantized(quant_method="gptq", bits=4), "quantization_config: group_size: "),
    "AWQ": (quantized(quant_method="awq"), "quantization_config: group_size: "),
    "FP8": (quantized(quant_method="fp8"), "quantization_config: activation_scheme: "),
    "bitsandbytes": (quantized(quant_method="bitsandbytes"), "bitsandbytes"),
    "compressed-tensors": (quantized(quant_method="compressed-tensors"), "config_groups: "),
    "of no known quantizer": (quantized(load_in_8bit=True), "quantization_config: "),
    "ModelOpt": (modelopt, "hf_quant_config.json: "),
    "GGUF directory": (lambda path: gguf_file(path).parent, "GGUF"),
    "GGUF file": (gguf_file, "GGUF"),
    "GGUF beside a config": (
        lambda path: bare(path, config__json=json.dumps(config()), m__gguf="GGUF"), "GGUF",
    ),
    "LoRA adapter": (
        lambda path: bare(path, adapter_config__json="{}", adapter_model__safetensors=""), "LoRA",
    ),
    "LoRA adapter with the config": (adapter_with_config, "LoRA"),
    "Meta's files": (lambda path: bare(path, params__json="{}"), "params.json"),
    "Mistral's files": (consolidated, "consolidated*.safetensors"),
    "Mistral's files with a config": (
        lambda path: write_config(consolidated(path), {}, weights=False), "consolidated",
    ),
    "the Hub's cache": (cache_folder, "snapshots"),
    "pointer for weights": (pointer_as("model.safetensors"), "safetensors: this is a Git LFS"),
    "pointer for the config": (pointer_as("config.json"), "git lfs pull"),
    "pointer for the index": (pointer_as("model.safetensors.index.json"), "index.json: "),
    "a tensor missing": (
        lambda path: write_model(path, config(), lambda tensors: tensors.pop("lm_head.weight")),
        "lm_head.weight: missing",
    ),
}  # fmt: skip
OPENS_A_MODEL: dict[str, tuple[str, ...]] = {
    "compress": ("--kv-ratio", "0.5", "--calibration", "TEXT", "--out", "OUT"),
    "calibrate": ("--text", "TEXT", "--out", "OUT"),
    "plan": ("--kv-ratio", "0.5"),
    "evaluate": ("--text", "TEXT"),
    "repair": ("--out", "OUT"),
    "export": ("--out", "OUT"),
    "import": ("OUT",),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_models_are_refused_by_inspect_and_verify(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, sentence = UNSUPPORTED[case]
    model = make(tmp_path / "model")
    said = error(capsys, "inspect", model)
    assert said.startswith(str(model))
    assert sentence in said
    assert main(["inspect", "--verify", str(model)]) == 1
    (fault,) = capsys.readouterr().out.splitlines()
    assert sentence in fault


@pytest.mark.parametrize("verb", OPENS_A_MODEL)
@pytest.mark.parametrize("case", ["Qwen2.5-VL", "GPTQ", "LoRA adapter", "a tensor missing"])
def test_every_verb_refuses_unsupported_models(
    case: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, sentence = UNSUPPORTED[case]
    (tmp_path / "text").write_text("words " * 999)
    names = {"TEXT": str(tmp_path / "text"), "OUT": str(tmp_path / "out")}
    model = make(tmp_path / "model")
    said = error(capsys, verb, model, *(names.get(word, word) for word in OPENS_A_MODEL[verb]))
    assert said.startswith(str(model))
    assert sentence in said
    assert not list(tmp_path.glob("out*"))

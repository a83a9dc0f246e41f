"""A gac model is always checked, whatever config.json and options say."""

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.transformers_utils.config import HFConfigParser

from tests.importers.layer_models import heterogeneous
from tests.importers.tools import write
from tests.serving.stubs import ModelConfigStub, VllmConfigStub, stream
from tests.support.dense_models import config as dense_config
from tests.support.model_files import Tensors, config, gac_config, tensors_of, write_model
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.serving.config import hook
from vllm_gac.serving.config.foreign_code import FOREIGN, ForeignCodeHook
from vllm_gac.serving.config.hook import GacConfigHook
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.loader import GacModelLoader

DOWN = "model.layers.1.mlp.down_proj.weight"
NAN = struct.pack("<H", 0x7FC1)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gac": {"architectures": [ARCHITECTURE]},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "other": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "none": {"architectures": None},
    "gac behind llama": {"architectures": ["LlamaForCausalLM", ARCHITECTURE]},
    "gac before llama": {"architectures": [ARCHITECTURE, "LlamaForCausalLM"]},
}
FAULTS: dict[str, dict[str, Any]] = {
    "sound": {},
    "missing": {"change": lambda tensors: tensors.pop(DOWN)},
    "extra": {"change": lambda tensors: tensors.update(extra=("BF16", (4, 4)))},
    "NaN": {"fill": {DOWN: NAN}},
}


def written(directory: Path, architecture: str, gac: bool, fault: str) -> Path:
    """Write a model whose tensors follow the layout, except for `fault`."""
    sound = gac_config() if gac else config()
    tensors, parts = tensors_of(sound), dict(FAULTS[fault])
    change: Callable[[Tensors], object] = parts.pop("change", lambda tensors: None)

    def changed(stored: Tensors) -> None:
        stored.clear()
        stored.update(tensors)
        change(stored)

    write_model(directory, sound, changed, **parts)
    raw = sound | ARCHITECTURES[architecture]
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def served_by(directory: Path, load_format: str, **overrides: Any) -> str:
    """Which code would serve `directory`, by the steps that vLLM runs before it has an engine."""
    _, hf_config = GacConfigParser().parse(
        directory, False, revision=None, code_revision=None, hf_overrides=overrides
    )
    hf_config.update(overrides)
    model_type = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    names = hf_config.architectures or [model_type[hf_config.model_type]]
    config = VllmConfigStub(
        directory,
        hf_config=hf_config,
        load_format=load_format,
        architecture=names[0],
        runner_type="generate",
        convert_type="none",
    )
    steps = {ARCHITECTURE: GacConfigHook, **dict.fromkeys(FOREIGN, ForeignCodeHook)}.get(names[0])
    if steps is not None:
        steps.verify_and_update_model_config(config.model_config)
    if steps is GacConfigHook:  # what it does next, as far as it needs no engine
        hook._choose_load_format(config.load_config)
        hook._preflight(directory, GacConfig.of(hf_config), config.load_config)
    if config.load_config.load_format != "gac":
        return "vLLM"
    for _ in config.stream():
        pass
    return "us" if names[0] == ARCHITECTURE else "vLLM, checked"


def expected(architecture: str, gac: bool, load_format: str, fault: str) -> str:
    if gac or architecture in ("gac", "gac before llama"):
        return "us" if gac and architecture == "gac" and fault == "sound" else "refused"
    if load_format == "auto":
        return "vLLM"
    checkable = architecture in ("llama", "mistral", "none")
    return "vLLM, checked" if checkable and fault == "sound" else "refused"


@pytest.mark.parametrize(
    ("architecture", "gac", "load_format", "fault"),
    list(itertools.product(ARCHITECTURES, (True, False), ("gac", "auto"), FAULTS)),
)
def test_no_gac_model_or_gac_load_format_is_served_unchecked(
    architecture: str, gac: bool, load_format: str, fault: str, tmp_path: Path
) -> None:
    directory = written(tmp_path, architecture, gac, fault)
    reader = expected(architecture, gac, load_format, fault)
    if reader != "refused":
        assert served_by(directory, load_format) == reader
        return
    with pytest.raises(CheckpointError, match=f"architectures|{DOWN}|extra|model_type"):
        served_by(directory, load_format)


@pytest.mark.parametrize("load_format", ["auto", "dummy", "gac"])
@pytest.mark.parametrize("extra", ["x", [1], {"alignment": "none"}])
def test_loader_options_are_checked_before_they_are_used(load_format: str, extra: object) -> None:
    config: Any = SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)
    with pytest.raises(CheckpointError, match=r"^--model-loader-extra-config: "):
        hook._choose_load_format(config)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "overrides",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["LlamaForCausalLM"], "gac": None},
        {"gac": None},
    ],
)
def test_overrides_do_not_bypass_the_check(
    overrides: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    directory = written(tmp_path, "gac", True, fault)
    with pytest.raises(CheckpointError, match=r"architectures|changes gac"):
        served_by(directory, "auto", **overrides)


def test_overrides_that_make_a_dense_model_ours_are_checked(tmp_path: Path) -> None:
    directory, section = write_model(tmp_path, config()), layout_of(config()).section()
    overrides = {"architectures": [ARCHITECTURE], "gac": section}
    assert served_by(directory, "auto", **overrides) == "us"
    section["layers"][1]["ranks"]["mlp.down_proj"] = 8
    with pytest.raises(CheckpointError, match=r"down_proj\.A\.weight"):
        served_by(directory, "auto", **overrides)


def test_a_gac_object_in_malformed_json_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, "llama", True, "missing")
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.rstrip("}") + '}, "gac": null}')
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        served_by(directory, "auto")


@pytest.mark.parametrize(
    "load_format",
    ["pt", "npcache", "mistral", "fastsafetensors", "instanttensor", "runai_streamer",
     "runai_streamer_sharded", "sharded_state", "tensorizer", "ipc_cache", "modelexpress"],
)  # fmt: skip
def test_no_other_loader_reads_a_gac_model(load_format: str, tmp_path: Path) -> None:
    directory = written(tmp_path, "gac", True, "sound")
    with pytest.raises(CheckpointError, match=f"--load-format {load_format}"):
        served_by(directory, load_format)


def test_dummy_weights_come_from_our_loader() -> None:
    config = LoadConfig(load_format="dummy", model_loader_extra_config={"align": "none"})
    hook._choose_load_format(config)
    assert config.load_format == "gac"
    options = GacModelLoader(config).options
    assert (options.weights, options.align) == ("dummy", "none")


def test_a_drafter_of_another_architecture_is_loaded_by_a_gac_models_load_format(
    tmp_path: Path,
) -> None:
    directory = written(tmp_path, "other", False, "sound")
    stub = ModelConfigStub(directory)
    stub.runner_type = "draft"  # type: ignore[attr-defined]
    loader = GacModelLoader(LoadConfig(load_format="gac", use_tqdm_on_load=False))
    assert loader._preflight(stub) is None  # type: ignore[arg-type]
    stub.runner_type = "generate"  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="--load-format gac"):
        loader._preflight(stub)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gac", "options"),
    [
        (True, {}),
        (True, {"hf_overrides": lambda c: c.update({"architectures": ["LlamaForCausalLM"]}) or c}),
        (False, {"hf_overrides": {"gac": gac_config()["gac"]}}),
        (True, {"hf_config_path": "dense"}),
    ],
    ids=["config.json", "a function", "a gac object for Llama", "another's config.json"],
)
def test_create_engine_config_refuses_a_gac_model_for_other_code(
    gac: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    architecture = "llama" if not gac or not options else "gac"
    directory = written(tmp_path / "model", architecture, gac, "missing")
    if "hf_config_path" in options:
        options = {"hf_config_path": str(written(tmp_path / "dense", "llama", False, "sound"))}
    arguments = EngineArgs(model=str(directory), skip_tokenizer_init=True, **options)
    assert MODELS_CONFIG_MAP["LlamaForCausalLM"] is ForeignCodeHook
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*gac"):
        arguments.create_engine_config()


def test_other_models_use_the_previous_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Before(HFConfigParser):
        def parse(self, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return {}, None

    monkeypatch.setattr(GacConfigParser, "before", Before)
    assert GacConfigParser().parse(str(demo.MODEL), True, "main", token="t") == ({}, None)
    assert calls == [((str(demo.MODEL), True, "main"), {"token": "t"})]


def test_the_loader_sends_what_another_tool_wrote_to_import(tmp_path: Path) -> None:
    raw = dense_config()
    write(tmp_path, raw, heterogeneous(raw, [{"intermediate_size": 40}, {}]))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp.*vllm-gac import"):
        dict(stream(tmp_path))

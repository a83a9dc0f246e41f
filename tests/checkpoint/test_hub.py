"""Models by their id on the Hub: a Hub on this machine, its cache, and every way to miss one."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support import hub
from tests.support.hub import Hub, Repository
from tests.support.model_files import config, write_model
from vllm_gac.checkpoint.base_model import base_model
from vllm_gac.checkpoint.hub import cached_id, model_directory
from vllm_gac.checkpoint.locate import auxiliary_files
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import HubError
from vllm_gac.steps.inspect import inspect

# What vLLM fetches of a model.
_OF_VLLM = ("config.json", "model.safetensors", "tokenizer.json")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with org/model, of which the branch `wide` has wider MLPs; the cache is empty."""
    monkeypatch.chdir(tmp_path)
    beside = {
        "README.md": b"---\nlicense: mit\n---\n# Model\n",
        "LICENSE": b"Do what you like.",
        "tokenizer.json": b"{}",
        "generation_config.json": b"{}",
        "pytorch_model.bin": b"a pickle",
        "consolidated.safetensors": b"the same weights",
        "original/model.safetensors": b"the same weights",
        "original/tokenizer.json": b"{}",
        "tokenizers/vocab.json": b"{}",
        "additional_chat_templates/rag.jinja": b"{{ messages }}",
    }
    narrow = hub.files_of(write_model(tmp_path / "narrow", config(), shards=2)) | beside
    wide = hub.files_of(write_model(tmp_path / "wide", config(intermediate_size=64))) | beside
    pickled = {"config.json": narrow["config.json"], "pytorch_model.bin": b"a pickle"}
    with hub.running() as stand_in, hub.used_here(stand_in, tmp_path / "home"):
        stand_in.models["org/model"] = Repository({"main": narrow, "wide": wide})
        stand_in.models["org/gated"] = Repository({"main": narrow}, token="hf_granted")
        stand_in.models["org/pickled"] = Repository({"main": pickled})
        yield stand_in


def refused(*names: str, model: str, revision: str | None = None) -> None:
    """The model is refused in one line that begins with the first of `names` and has all."""
    with pytest.raises(HubError) as error:
        model_directory(model, revision)
    said = str(error.value)
    assert said.isprintable()
    assert said.startswith(names[0])
    assert all(name in said for name in names), said


def test_a_model_is_fetched_once_and_then_found_without_the_hub(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_directory("org/model")
    assert sorted(path.name for path in directory.iterdir()) == [
        "LICENSE",
        "README.md",
        "additional_chat_templates",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert cached_id(directory) == ("org/model", directory.name)
    assert not any("pytorch_model" in asked or "original" in asked for asked in here.asked)
    here.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_directory("org/model") == directory
    assert model_directory("org/model", directory.name) == directory
    assert here.asked == []


def test_a_revision_is_a_branch_or_a_commit(here: Hub) -> None:
    by_branch = model_directory("org/model", "wide")
    assert inspect("org/model").layers[0]["intermediate_size"] == 48
    assert inspect("org/model", revision="wide").layers[0]["intermediate_size"] == 64
    commit = here.models["org/model"].commit("wide")
    assert by_branch.name == commit
    assert model_directory("org/model", commit) == by_branch


def test_a_snapshot_says_where_it_is_from(here: Hub) -> None:
    directory = model_directory("org/model")
    checkpoint = open_checkpoint(directory)
    assert list(all_faults(checkpoint)) == []
    names = [str(path.relative_to(directory)) for path in auxiliary_files(directory)]
    rag = "additional_chat_templates/rag.jinja"
    assert names == ["LICENSE", rag, "generation_config.json", "tokenizer.json"]
    base = base_model(checkpoint)
    assert (base.hub_id, base.revision) == ("org/model", directory.name)
    assert base.licence == {"license": "mit"}


def test_a_directory_of_the_same_name_is_taken_and_said_if_the_hub_has_one_too(
    here: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_gac")
    model_directory("org/model")
    caplog.clear()
    write_model(tmp_path / "org" / "model", config())
    assert model_directory("org/model") == Path("org/model")
    assert "org/model" in caplog.text
    refused("--revision wide", "org/model", model="org/model", revision="wide")
    caplog.clear()
    write_model(tmp_path / "org" / "other", config())
    assert model_directory("org/other") == Path("org/other")
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "../a/b", "/a/b", "a/b.pt", "a/b.gguf", ""])
def test_names_that_are_no_hub_ids_are_returned_as_paths(name: str, here: Hub) -> None:
    assert model_directory(name) == Path(name)
    assert here.asked == []


def test_a_gated_model_needs_a_token(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("org/gated", f"{here.url}/org/gated", "hf auth login", "HF_TOKEN", model="org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    assert (model_directory("org/gated") / "config.json").exists()


@pytest.mark.parametrize("revision", ["", " ", "v1\n"])
def test_a_revision_has_a_name(revision: str, here: Hub) -> None:
    """An empty one, as of a variable that is not set, is not main."""
    refused("--revision", model="org/model", revision=revision)
    assert here.asked == []


def test_unknown_models_and_revisions_are_refused(here: Hub) -> None:
    refused("org/nothing", here.url, "HF_TOKEN", model="org/nothing")
    refused("--revision v9", "org/model", model="org/model", revision="v9")


def test_pickles_are_not_fetched(here: Hub) -> None:
    refused("org/pickled", "*.safetensors", model="org/pickled")
    assert not any("pytorch_model.bin" in asked for asked in here.asked)
    # A tokenizer and a config are enough for some.
    assert (model_directory("org/pickled", weights=False) / "config.json").exists()


def test_offline_the_cache_and_the_switch_are_named(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = str(tmp_path / "home" / "hub")
    refused("org/model", "wide", cache, "HF_HUB_OFFLINE", model="org/model", revision="wide")
    assert here.asked == []


def test_without_a_network_the_cache_is_named_and_what_is_in_it_is_used(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_directory("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    assert model_directory("org/model") == directory
    refused("org/other", str(tmp_path / "home" / "hub"), NOWHERE, model="org/other")


def test_a_snapshot_fetched_by_vllm_is_used_offline(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM fetches no licence and no card, and huggingface_hub knows that they are missing."""
    directory = model_directory("org/model")
    for name in ("LICENSE", "README.md", "generation_config.json"):
        (directory / name).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_directory("org/model") == directory
    (directory / "model-00002-of-00002.safetensors").unlink()
    refused("org/model", model="org/model")


def test_a_cache_that_was_copied_is_read(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without the lists of files that huggingface_hub keeps, as older versions made it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    files = here.models["org/model"].files("wide")
    kept = {name: contents for name, contents in files.items() if name in _OF_VLLM}
    snapshot = hub.cached(tmp_path / "home", "org/copied", kept)
    assert inspect("org/copied").layers[0]["intermediate_size"] == 64
    assert model_directory("org/copied") == snapshot

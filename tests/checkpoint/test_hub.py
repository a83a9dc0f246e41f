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
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.checkpoint.writer import companions_of
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
    }
    narrow = hub.files_of(write_model(tmp_path / "narrow", config(), shards=2)) | beside
    wide = hub.files_of(write_model(tmp_path / "wide", config(intermediate_size=64))) | beside
    pickled = {"config.json": narrow["config.json"], "pytorch_model.bin": b"a pickle"}
    with hub.running() as found, hub.used_here(found, tmp_path / "home"):
        found.models["org/model"] = Repository({"main": narrow, "wide": wide})
        found.models["org/gated"] = Repository({"main": narrow}, token="hf_granted")
        found.models["org/pickled"] = Repository({"main": pickled})
        yield found


def refused(model: str, revision: str | None = None) -> str:
    with pytest.raises(HubError) as error:
        model_directory(model, revision)
    said = str(error.value)
    assert "\n" not in said
    assert said.isprintable()
    return said


def test_a_model_is_fetched_once_and_then_found_without_the_hub(
    here: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_gac")
    directory = model_directory("org/model")
    assert sorted(path.name for path in directory.iterdir()) == [
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert cached_id(directory) == ("org/model", directory.name)
    assert f"org/model: revision {directory.name} in {directory}" in caplog.text
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


def test_the_links_of_a_snapshot_are_read_and_links_to_elsewhere_are_refused(
    here: Hub, tmp_path: Path
) -> None:
    directory = model_directory("org/model")
    assert (directory / "config.json").is_symlink()
    checkpoint = open_checkpoint(directory)
    assert list(faults(checkpoint, finite=True)) == []
    assert [path.name for path in companions_of(directory)] == [
        "LICENSE",
        "generation_config.json",
        "tokenizer.json",
    ]
    base = base_model(checkpoint)
    assert (base.hub_id, base.revision, base.licence) == (
        "org/model",
        directory.name,
        {"license": "mit"},
    )
    (directory / "LICENSE").unlink()
    (directory / "LICENSE").symlink_to(tmp_path / "narrow" / "config.json")
    with pytest.raises(ValueError, match="outside the model directory"):
        companions_of(directory)


def test_a_directory_of_the_same_name_is_taken_and_said_if_the_hub_has_one_too(
    here: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm_gac")
    model_directory("org/model")
    caplog.clear()
    write_model(tmp_path / "org" / "model", config())
    assert model_directory("org/model") == Path("org/model")
    assert "the directory is used, not the Hub's model of that name" in caplog.text
    assert "--revision wide: org/model is on this machine" in refused("org/model", "wide")
    caplog.clear()
    write_model(tmp_path / "org" / "other", config())
    assert model_directory("org/other") == Path("org/other")
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "../a/b", "/a/b", "a/b.pt", "a/b.gguf", ""])
def test_what_is_no_id_is_left_to_be_refused_as_a_path(name: str, here: Hub) -> None:
    assert model_directory(name) == Path(name)
    assert here.asked == []


def test_a_gated_model_needs_a_token(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused("org/gated")
    assert said.startswith("org/gated: is gated, and the Hub does not let you have it; accept its")
    assert f"{here.url}/org/gated, then log in with 'hf auth login', or set HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    assert (model_directory("org/gated") / "config.json").exists()


def test_what_the_hub_does_not_have(here: Hub) -> None:
    missing = refused("org/nothing")
    assert missing.startswith(
        f"org/nothing: neither a path on this machine nor a model that you may see at {here.url}"
    )
    assert "HF_TOKEN" in missing
    revision = refused("org/model", "v9")
    assert revision.startswith("--revision v9: org/model has no such branch, tag or commit")


@pytest.mark.parametrize("revision", ["", " ", "v1\n"])
def test_a_revision_has_a_name(revision: str, here: Hub) -> None:
    """An empty one, as of a variable that is not set, is not main."""
    assert "not the name of a branch, tag or commit" in refused("org/model", revision)
    assert here.asked == []


def test_pickles_are_not_fetched(here: Hub) -> None:
    assert "org/pickled: no *.safetensors at its top level" in refused("org/pickled")
    assert not any("pytorch_model.bin" in asked for asked in here.asked)
    # A tokenizer and a config are enough for some.
    assert (model_directory("org/pickled", weights=False) / "config.json").exists()


def test_offline_the_cache_and_the_switch_are_named(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = refused("org/model", "wide")
    assert said.startswith(
        "org/model at revision wide: not on this machine, and not whole in the Hub's cache at "
        f"{tmp_path / 'home' / 'hub'}; HF_HUB_OFFLINE forbids to fetch it"
    )
    assert here.asked == []


def test_without_a_network_the_cache_is_named_and_what_is_in_it_is_used(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_directory("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    assert model_directory("org/model") == directory
    said = refused("org/other")
    assert f"not whole in the Hub's cache at {tmp_path / 'home' / 'hub'}" in said
    assert f"{NOWHERE} does not answer" in said


def test_what_vllm_alone_has_fetched_is_enough_offline(
    here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM fetches no licence and no card, and huggingface_hub knows that they are missing."""
    directory = model_directory("org/model")
    for name in ("LICENSE", "README.md", "generation_config.json"):
        (directory / name).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_directory("org/model") == directory
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "not whole in the Hub's cache" in refused("org/model")


def test_a_cache_that_was_copied_is_read(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without the lists of files that huggingface_hub keeps, as older versions made it."""
    files = here.models["org/model"].files("wide")
    snapshot = hub.cached(
        tmp_path / "home",
        "org/copied",
        {name: contents for name, contents in files.items() if name in _OF_VLLM},
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert inspect("org/copied").layers[0]["intermediate_size"] == 64
    assert model_directory("org/copied") == snapshot

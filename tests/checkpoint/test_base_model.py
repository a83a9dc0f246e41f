"""The base model that a model card names."""

from pathlib import Path
from typing import Any

import yaml

from tests.support.model_files import config, gac_config, write_model
from vllm_gac.checkpoint.base_model import BaseModel, base_model
from vllm_gac.checkpoint.open import open_checkpoint


def made(directory: Path, raw: dict[str, Any] | None = None, card: str = "") -> BaseModel:
    write_model(directory, raw or config())
    if card:
        (directory / "README.md").write_text(card)
    return base_model(open_checkpoint(directory))


def test_a_model_has_the_name_of_its_repository_or_directory(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "d04e592bb4f6"
    base = made(snapshot)
    assert base.name == base.hub_id == "meta-llama/Llama-3.1-8B"
    base = made(tmp_path / "my [model]")
    assert (base.name, base.hub_id) == ("my ?model?", None)


def test_the_licence_is_that_of_the_card_or_of_the_file(tmp_path: Path) -> None:
    card = "---\r\nlanguage: en\r\nlicense: 'llama3.1'\r\n---\r\n# A model\nlicense: none\n"
    assert made(tmp_path / "card", card=card).licence == {"license": "llama3.1"}
    assert made(tmp_path / "none", card="# A model\n---\nlicense: mit\n---\n").licence == {}
    write_model(tmp_path / "file", config())
    (tmp_path / "file" / "LICENSE").touch()
    base = made(tmp_path / "file")
    assert base.licence == {"license": "other", "license_link": "LICENSE"}
    assert "its text is in `LICENSE`" in base.origin()
    assert "does not say which" in made(tmp_path / "none").origin()


def test_the_front_matter_is_the_yaml_that_the_hub_reads(tmp_path: Path) -> None:
    card = "---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\n---\n"
    base = made(tmp_path / "models--org--base" / "snapshots" / "0", card=card)
    head = base.front_matter()
    assert yaml.safe_load(head.strip("-")) == {
        "license": "other",
        "license_name": "llama3",
        "license_link": "LICENSE",
        "base_model": ["org/base"],
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["vllm-gac", "compressed"],
    }
    assert base.origin().splitlines()[1] == "The base model's licence applies: llama3."
    # A model that is made from a compressed model has the same base model.
    again = made(tmp_path / "gac", gac_config(), f"{head}\n# org/base, compressed\n")
    assert (again.name, again.hub_id) == ("gac", "org/base")
    assert again.licence == base.licence


def test_a_card_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    write_model(tmp_path, config())
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\xfe\n" + b"a" * (1 << 20))
    assert made(tmp_path).licence == {}

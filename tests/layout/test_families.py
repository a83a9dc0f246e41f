"""Each family has what it owes: models in the tests of all families, and its name on pages."""

import re

import pytest

from tests.alignment import random_models
from tests.compression import test_reference_model
from tests.serving import test_families as served
from tests.steps import test_compress
from tests.support.imports import ROOT
from vllm_gac.layout.families import FAMILIES, NAMES, Family

# The model types of the models that each of these tests has.
TESTED = {
    "a reference as transformers (tests/compression/test_reference_model.py: MODELS)": {
        changes.get("model_type", "llama") for changes in test_reference_model.MODELS.values()
    },
    "models whose padding is exact (tests/alignment/random_models.py: FAMILIES)": {
        family["model_type"] for family in random_models.FAMILIES
    },
    "a model that is compressed as a whole (tests/steps/test_compress.py: MODELS)": {
        raw["model_type"] for raw, _ in test_compress.MODELS.values()
    },
    "a model that is served, dense and compressed (tests/serving/test_families.py: FAMILY)": {
        name.split()[0] for name in served.FAMILY
    },
}
PAGES = (
    "README.md",
    "docs/architecture.md",
    "docs/compatibility.md",
    "docs/guide.md",
    "docs/how-it-works.md",
)


def owed(model_type: str, family: Family) -> list[str]:
    """What a family does not have yet."""
    pages = {page: (ROOT / page).read_text() for page in PAGES}
    return [
        *(what for what, tested in TESTED.items() if model_type not in tested),
        *(
            f"its name on {page}"
            for page, text in pages.items()
            if not re.search(rf"\b{re.escape(family.name)}\b", text)
        ),
    ]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_has_what_it_owes(model_type: str) -> None:
    assert not owed(model_type, FAMILIES[model_type])


def test_a_new_family_owes_everything() -> None:
    assert len(owed("seed_oss", Family("Seed-OSS", "SeedOssForCausalLM"))) == len(TESTED) + len(
        PAGES
    )


def test_all_are_named() -> None:
    assert NAMES == "Llama, Mistral, Qwen2 and Qwen3"

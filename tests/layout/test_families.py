"""Each family has what it owes: models in the tests of all families."""

import pytest

pytest.importorskip("torch")

from tests.alignment import random_models
from tests.compression import test_reference_model
from tests.serving import test_families as served
from tests.steps.compress import test_compress
from vllm_gac.layout.families import FAMILIES, NAMES

# The model types of the models that each of these tests has.
TESTED = {
    "a reference as transformers (tests/compression/test_reference_model.py: MODELS)": {
        changes.get("model_type", "llama") for changes in test_reference_model.MODELS.values()
    },
    "models whose padding is exact (tests/alignment/random_models.py: FAMILIES)": {
        family["model_type"] for family in random_models.FAMILIES
    },
    "a model that is compressed as a whole (tests/steps/compress/test_compress.py: MODELS)": {
        raw["model_type"] for raw, _ in test_compress.MODELS.values()
    },
    "a model that is served, dense and compressed (tests/serving/test_families.py: FAMILY)": {
        name.split()[0] for name in served.FAMILY
    },
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_in_the_tests_of_all_families(model_type: str) -> None:
    assert [what for what, tested in TESTED.items() if model_type not in tested] == []


def test_the_list_of_names_has_every_family() -> None:
    assert NAMES.replace(" and ", ", ").split(", ") == [x.name for x in FAMILIES.values()]
    assert NAMES.count(" and ") == 1

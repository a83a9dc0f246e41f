"""Each family has what it owes: models in the tests of all families."""

import math

import pytest

pytest.importorskip("torch")

from tests.alignment import random_models
from tests.compression import test_reference_model
from tests.serving import test_families as served
from tests.steps.compress import test_compress
from tests.support.dense_models import YARN_ROPE, config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.config_keys import LLAMAS_CLASS
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.families import FAMILIES, NAMES
from vllm_gac.layout.schema import RopeParameters

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


def test_vllms_other_names_of_llamas_class_are_known() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    names = {
        architecture.removesuffix("ForCausalLM").lower()
        for architecture, served in registry._TEXT_GENERATION_MODELS.items()
        if served == ("llama", "LlamaForCausalLM")
    }
    assert names == {"llama", *LLAMAS_CLASS}


@pytest.mark.parametrize("model_type", LLAMAS_CLASS)
def test_a_llama_under_another_name_is_refused_with_a_hint(model_type: str) -> None:
    raw = config(model_type=model_type, architectures=["OtherForCausalLM"], qkv_bias=False)
    with pytest.raises(CheckpointError, match=model_type):
        layout_of(raw)
    renamed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    assert layout_of(raw | renamed) == layout_of(config())


def test_the_yarn_that_a_telechat_is_told_is_what_vllm_makes_of_its_own() -> None:
    from transformers import LlamaConfig

    patch = pytest.importorskip("vllm.transformers_utils.config").patch_rope_parameters
    theirs = LlamaConfig()
    theirs.rope_parameters = YARN_ROPE | {"rope_type": "telechat3-yarn"}
    patch(theirs)
    told = YARN_ROPE | {"attention_factor": 0.07 * math.log(YARN_ROPE["factor"]) + 1}
    assert RopeParameters(**theirs.rope_parameters) == RopeParameters(**told)


def test_the_list_of_names_has_every_family() -> None:
    assert NAMES.replace(" and ", ", ").split(", ") == [x.name for x in FAMILIES.values()]
    assert NAMES.count(" and ") == 1

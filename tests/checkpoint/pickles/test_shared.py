"""Pickles that refer to one part many times. Limits apply to the result, not only to the file.

The bombs here are small. Larger ones would not take more bytes, but would take hours to follow.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.pickles import foreign
from tests.importers.pickled_models import llm_pruner
from vllm_gac.checkpoint.pickles.module_tree import named_tensors
from vllm_gac.checkpoint.pickles.values import Class, Instance
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.pickled_companions import pickled_companions
from vllm_gac.importers.pickled_model import open_pickled_model


def laughs(width: int, depth: int, innermost: Any = 7) -> list[Any]:
    """`width` ** `depth` values in `width` * `depth` places."""
    value = innermost
    for _ in range(depth):
        value = [value] * width
    return value


def pruned(directory: Path, tokenizer: Any = None, **config: Any) -> Path:
    model = llm_pruner([foreign.dims(width=64)] * 2, **config)
    foreign.save(directory / "m.pt", {"model": model, "tokenizer": tokenizer})
    return directory / "m.pt"


BOMBS = {
    "lists in lists": laughs(9, 4),
    "a list of one text": laughs(2000, 1, "x" * 1000),
    "dicts in dicts": {"a": (inner := dict.fromkeys(map(str, range(80)), 1)), "b": [inner] * 60},
}


@pytest.mark.parametrize("key", ["eos_token_id", "rope_scaling"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_config_holds_no_more_than_one_that_is_written_out(
    bomb: str, key: str, tmp_path: Path
) -> None:
    path = pruned(tmp_path, **{key: BOMBS[bomb]})
    with pytest.raises(CheckpointError, match=rf"m\.pt: config\.{key}: more than 4096 values"):
        open_pickled_model(path)


@pytest.mark.parametrize("bomb", BOMBS)
def test_nor_does_a_tokenizer(bomb: str, tmp_path: Path) -> None:
    tokenizer = foreign.tokenizer("pieces")
    tokenizer.init_kwargs["chat_template"] = BOMBS[bomb]
    model = open_pickled_model(pruned(tmp_path, tokenizer))
    with pytest.raises(CheckpointError, match=r"its tokenizer\.chat_template: more than"):
        pickled_companions(model)


def test_nor_does_a_special_token(tmp_path: Path) -> None:
    tokenizer = foreign.tokenizer("pieces")
    tokenizer._bos_token.content = "x" * (2 << 20)
    model = open_pickled_model(pruned(tmp_path, tokenizer))
    with pytest.raises(CheckpointError, match=r"its tokenizer\.bos_token: more than"):
        pickled_companions(model)


def test_a_list_in_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    with pytest.raises(CheckpointError, match=r"config\.eos_token_id: "):
        open_pickled_model(pruned(tmp_path, eos_token_id=endless))


def test_a_config_may_share_what_is_small(tmp_path: Path) -> None:
    factors = [1.0] * 64
    scaling = {"short_factor": factors, "long_factor": factors}
    read = open_pickled_model(pruned(tmp_path, rope_scaling=scaling, eos_token_id=[2, 3]))
    assert read.config["rope_scaling"] == scaling


def module(parameters: dict[str, Any], **children: Instance) -> Instance:
    state = {"_parameters": parameters, "_buffers": {}, "_modules": children}
    return Instance(Class("torch.nn.modules.linear", "Linear"), state)


def test_modules_that_share_their_names_are_counted_one_by_one() -> None:
    shared = dict.fromkeys((f"p{i}" for i in range(1000)), None)
    few = module({}, **{f"m{i}": module(shared) for i in range(50)})
    assert named_tensors(few, "m.pt") == {}
    many = module({}, **{f"m{i}": module(shared) for i in range(100)})
    with pytest.raises(CheckpointError, match="more than 60000 names of parameters, buffers"):
        named_tensors(many, "m.pt")

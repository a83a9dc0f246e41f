"""A form of keys is not served, planned or compressed as one of those that code knows."""

import ast
from pathlib import Path

import pytest

import vllm_gac
from vllm_gac.layout import key_forms
from vllm_gac.layout.key_forms import KEY_FORMS, is_latent


def test_forms_are_told_apart_by_a_function_that_raises_for_an_unknown_one() -> None:
    for form in {*KEY_FORMS, "another"} - {"rotary", "latent"}:
        with pytest.raises(AssertionError):
            is_latent(form)  # type: ignore[arg-type]
    compared = {
        f"{path}:{node.lineno}"
        for path in Path(vllm_gac.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.MatchValue)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in KEY_FORMS
        if path != Path(key_forms.__file__)
    }
    assert not compared

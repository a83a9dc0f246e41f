"""What a model is asked to write answers to: functions and paragraphs of named packages."""

import ast
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

_FROM_CODE = (
    "Complete this function:\n\n```python\n{stub}\n```",
    "Complete this function:\n\n```python\n{stub}\n```",
    "Write a Python function `{name}`. {doc}",
    "Explain what this does and implement it.\n\n```python\n{stub}\n```",
    "Write unit tests for this function, and an implementation.\n\n```python\n{stub}\n```",
)
_FROM_PROSE = (
    "Summarize this in two sentences:\n\n{text}",
    "Explain this to a beginner:\n\n{text}",
    "What questions should a reader ask about this? Answer them.\n\n{text}",
    "Rewrite this in plain words:\n\n{text}",
)
_SHORTEST, _LONGEST = 40, 600  # characters of what is asked about


def prompts(
    code: Sequence[Mapping[str, Any]], prose: Sequence[Mapping[str, Any]], count: int
) -> list[str]:
    """Up to `count` prompts, three of code to one of prose. No two have the same subject."""
    rng = random.Random(0)
    subjects = (_functions(code, rng), _paragraphs(prose, rng))
    of_code, of_prose = (list(dict.fromkeys(of_subject)) for of_subject in subjects)
    rng.shuffle(of_code)
    rng.shuffle(of_prose)
    rows = zip_longest(of_code[::3], of_code[1::3], of_code[2::3], of_prose)
    return [prompt for prompt in chain.from_iterable(rows) if prompt][:count]


def _functions(records: Sequence[Mapping[str, Any]], rng: random.Random) -> Iterator[str]:
    seen = set()
    for record in records:
        for node in ast.walk(_parsed(record["text"])):
            if not isinstance(node, ast.FunctionDef):
                continue
            doc = ast.get_docstring(node) or ""
            if _SHORTEST <= len(doc) <= _LONGEST and (node.name, doc) not in seen:
                seen.add((node.name, doc))
                stub = f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}"""'
                yield rng.choice(_FROM_CODE).format(stub=stub, name=node.name, doc=doc)


def _parsed(text: str) -> ast.Module:
    """The functions of a file, whose end may have been cut off."""
    lines = text.split("\n")
    with warnings.catch_warnings(action="ignore"):  # of the file's own escapes
        for end in (len(lines), *_starts(lines)):
            try:
                return ast.parse("\n".join(lines[:end]))
            except (SyntaxError, ValueError):
                continue
    return ast.Module([], [])


def _starts(lines: Sequence[str]) -> list[int]:
    """Where the last few top-level functions and classes begin."""
    starts = [n for n, line in enumerate(lines) if line.startswith(("def ", "class ", "@"))]
    return starts[:-4:-1]


def _paragraphs(records: Sequence[Mapping[str, Any]], rng: random.Random) -> Iterator[str]:
    for record in records:
        for text in record["text"].split("\n\n"):
            if 4 * _SHORTEST <= len(text) <= 2 * _LONGEST:
                yield rng.choice(_FROM_PROSE).format(text=text)

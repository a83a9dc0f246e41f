"""What a model is asked to write answers to: functions, paragraphs and exercises.

Functions and paragraphs are those of named packages; the model writes exercises.
"""

import ast
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, islice, zip_longest
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
# An exercise that the model is to write, about a word of what a function says of itself.
_EXERCISE = (
    "Write one small exercise of a textbook on algorithms: {topic} and {other}, on {data}. A word "
    'to start from: "{word}". Answer with one ```python block: a function without libraries, with '
    "type hints and a docstring, which says what it returns and has two examples as of an "
    "interpreter (>>>). Leave out the solution."
)
_TOPICS = (
    *("counting", "sorting", "searching", "filtering", "number theory", "parsing", "grouping"),
    *("transforming text", "geometry", "dynamic programming", "simulating a process", "sequences"),
    *("bits", "dates and times", "encoding", "comparing", "statistics", "recursion", "validation"),
)
_DATA = (
    *("a list of integers", "a list of numbers", "a string", "two strings", "a list of strings"),
    *("an integer", "two integers", "a nested list", "two lists", "a dictionary", "a sentence"),
)


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


def exercise_requests(
    code: Sequence[Mapping[str, Any]], count: int, rng: random.Random
) -> list[str]:
    """Up to `count` prompts that ask for a programming exercise, in turn of every function."""
    words = [sorted(set(re.findall(r"\b[a-z]{5,12}\b", doc))) for _, doc in _documented(code)]
    rng.shuffle(words)
    asked = []
    for about in islice(cycle(filter(None, words)), count):
        topic, other = rng.sample(_TOPICS, 2)
        word, data = rng.choice(about), rng.choice(_DATA)
        asked.append(_EXERCISE.format(topic=topic, other=other, data=data, word=word))
    return list(dict.fromkeys(asked))


def exercise_of(answer: str) -> tuple[str, str]:
    """The function's name of the exercise of an answer, and the prompt; empty if it has none."""
    block = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
    for node in _parsed(block.group(1)).body if block else ():
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            stub = f'def {node.name}({ast.unparse(node.args)}){returns}:\n    """{doc}"""'
            asked = random.Random(stub).choice(_FROM_CODE)
            return node.name, asked.format(stub=stub, name=node.name, doc=doc)
    return "", ""


def _functions(records: Sequence[Mapping[str, Any]], rng: random.Random) -> Iterator[str]:
    for node, doc in _documented(records):
        stub = f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}"""'
        yield rng.choice(_FROM_CODE).format(stub=stub, name=node.name, doc=doc)


def _documented(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions and what they say of themselves, each once."""
    seen = set()
    for record in records:
        for node in ast.walk(_parsed(record["text"])):
            if not isinstance(node, ast.FunctionDef):
                continue
            doc = ast.get_docstring(node) or ""
            if _SHORTEST <= len(doc) <= _LONGEST and (node.name, doc) not in seen:
                seen.add((node.name, doc))
                yield node, doc


def _parsed(text: str) -> ast.Module:
    """The functions of a file, whose end may have been cut off."""
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if line.startswith(("def ", "class ", "@"))]
    with warnings.catch_warnings(action="ignore"):  # of the file's own escapes
        # Cut where one of the last top-level functions and classes begins.
        for end in (len(lines), *starts[:-4:-1]):
            try:
                return ast.parse("\n".join(lines[:end]))
            except (SyntaxError, ValueError):
                continue
    return ast.Module([], [])


def _paragraphs(records: Sequence[Mapping[str, Any]], rng: random.Random) -> Iterator[str]:
    for record in records:
        for text in record["text"].split("\n\n"):
            if 4 * _SHORTEST <= len(text) <= 2 * _LONGEST:
                yield rng.choice(_FROM_PROSE).format(text=text)

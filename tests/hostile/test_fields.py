"""Every field of every file that is read, with every kind of value that it should not have.

Each document is read as a user's command reads it, and is used or refused in one sentence. `-s`
prints how many cases there are.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fuzz import documents, models
from fuzz.framing import SEPARATOR, joined
from fuzz.seeds import documents as document_seeds
from fuzz.seeds import seed
from tests.hostile.formats import CONFIGS
from tests.support import dense_models
from vllm_gac.errors import GacError
from vllm_gac.runs.workspace import claimed, finished_before, recorded
from vllm_gac.texts.chat_template import ChatTemplate
from vllm_gac.texts.text_files import blocks

Use = Callable[[bytes, Path], object]

VALUES = {
    "nested": "[" * 900 + "]" * 900,
    "nested objects": '{"a":' * 900 + "1" + "}" * 900,
    "huge": "1" + "0" * 400,
    "large": str(1 << 62),
    "large float": "1e308",
    "tiny": "5e-324",
    "NaN": "NaN",
    "lone surrogate": r'"\ud800"',
    "text": '"x"',
    "long text": '"' + "x" * 9999 + '"',
    "bool": "true",
    "negative": "-1",
    "zero": "0",
    "null": "null",
    "list": "[]",
    "object": "{}",
    "list of a list": "[[]]",
}
_PLACE = "\x1b place \x1b"


def mutants(document: Any) -> Iterator[tuple[str, bytes]]:
    """What was changed and the JSON, for each field and value; of a list, the ends change."""
    for path in _paths(document):
        changed = json.loads(json.dumps(document))
        container = changed
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = _PLACE
        text = json.dumps(changed)
        for kind, value in VALUES.items():
            name = f"{'.'.join(map(str, path))}: {kind}"
            yield name, text.replace(json.dumps(_PLACE), value).encode()


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        return
    ends = {0, len(value) - 1} if value else ()
    keys = list(value) if isinstance(value, dict) else sorted(ends)
    for key in keys:
        yield (key,)
        yield from ((key, *path) for path in _paths(value[key]))


def _document(kind: str) -> tuple[Any, Use]:
    _, content = document_seeds()[kind].split(SEPARATOR, 1)
    header, _, rest = content.partition(SEPARATOR)

    def use(raw: bytes, directory: Path) -> object:
        return documents.check(joined(kind.encode(), raw, *([rest] if rest else [])), directory)

    return json.loads(header), use


def _config(name: str) -> tuple[Any, Use]:
    header = seed(name).split(SEPARATOR, 1)[1]
    return CONFIGS[name], lambda raw, directory: models.check(joined(raw, header), directory)


def _statistics() -> tuple[Any, Use]:
    document, use = _document("statistics")
    first = {name: entry for name, entry in document.items() if not name.startswith("layers.1")}
    rest = {name: entry for name, entry in document.items() if name not in first}
    begin = json.dumps(rest).encode()[:-1] + b","
    return first, lambda raw, directory: use(begin + raw[1:], directory)


def _run(raw: bytes, directory: Path) -> None:
    out = directory / "out"
    partial = directory / "out.partial"
    partial.mkdir(exist_ok=True)
    (partial / "run.json").write_bytes(raw)
    out.mkdir(exist_ok=True)
    run = {"plan": {"param_ratio": 0.9, "quantized": {"linear": 1}}, "stats": {"file": [1, 2]}}
    for read in (recorded, lambda out: finished_before(out, "compress", run)):
        with suppress(GacError):
            read(out)
    with claimed(partial, "compress", run):
        pass


def _conversation(raw: bytes, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m }}{% endfor %}")
    (directory / "a.jsonl").write_bytes(raw + b"\n")
    for block in blocks(directory, directory / "a.jsonl", None):
        block.text.encode()


def _template(raw: bytes, directory: Path) -> None:
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "tokenizer_config.json").write_bytes(raw)
    with ChatTemplate(directory, directory / "a.jsonl") as template:
        template.render([{"role": "user", "content": "hi"}], "a.jsonl:1").encode()


_RUN = {
    "workspace": 2,
    "command": "compress",
    "run": {"plan": {"param_ratio": 0.8, "quantized": {"linear": 1}}, "stats": {"file": [1, 2]}},
    "inode": 5,
}
_TEMPLATES = {
    "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
}
_LINE = {"id": 1, "messages": [{"role": "user", "content": "hi"}]}

READERS: dict[str, Callable[[], tuple[Any, Use]]] = {
    "plan": lambda: _document("plan"),
    "problem": lambda: _document("problem"),
    "profile": lambda: _document("profile"),
    "statistics": _statistics,
    "run.json": lambda: (_RUN, _run),
    "conversations": lambda: (_LINE, _conversation),
    "tokenizer_config.json": lambda: (_TEMPLATES, _template),
    **{f"config.json, {name}": (lambda name=name: _config(name)) for name in CONFIGS},
}


# One in so many cases is in the fast suite, so that all kinds of values come to some fields.
SOME = 9


@pytest.mark.parametrize("every", [SOME, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", READERS)
def test_each_value_of_each_field_is_used_or_refused(
    reader: str, every: int, tmp_path: Path
) -> None:
    document, use = READERS[reader]()
    dense_models.write_tokenizer(tmp_path / "tokenizer.json", 128)
    faults, count = [], 0
    for name, raw in islice(mutants(document), 0, None, every):
        count += 1
        try:
            use(raw, tmp_path)
        except GacError as e:
            said = str(e)
            if not (said.isprintable() and len(said.encode()) < 2048):
                faults.append(f"{name}: says {said!r}")
        except Exception as e:
            faults.append(f"{name}: {type(e).__name__} {str(e)[:200]}")
    print(f"{reader}: {count} cases, {len(faults)} faults")
    assert not faults, "\n".join(faults[:40])
    assert count * every >= 80

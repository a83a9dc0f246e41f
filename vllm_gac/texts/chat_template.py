"""A model's chat template, which makes text of conversations, in a process with limits.

Who made the model chose the template. In transformers' sandbox it reaches nothing outside, but it
may compute for ever and make gigabytes of text. So it runs in a process of its own that is ended
when it takes more than a template does.
"""

import pickle
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import refuse_escape
from vllm_gac.checkpoint.strict_json import read_bounded, read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.limited_process import LimitedProcess

_MAX_TEMPLATE = 1 << 20  # bytes of a template
# Of a template's process: CPU seconds to begin with, for each conversation and for each of its
# bytes, additional bytes of memory, and characters of one text.
_SECONDS, _SECONDS_EACH, _SECONDS_A_BYTE = 1.0, 0.01, 1e-6
_MEMORY, _MAX_CHARACTERS = 1 << 26, 1 << 22


class ChatTemplate:
    """A template and its process, which ends with this object.

    Args:
        model: The model directory.
        texts: The file with conversations, which messages name.

    Raises:
        CheckpointError: The model has no template that can be read.
    """

    def __init__(self, model: Path, texts: Path) -> None:
        from transformers.utils import chat_template_utils  # noqa: F401 -- the process inherits it

        source, tokens = _template(model, texts)
        self._renderer = LimitedProcess(_MEMORY, _answer, source, tokens)

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, *exception: object) -> None:
        self._renderer.__exit__(*exception)

    def render(self, messages: Any, where: str) -> str:
        """The text of a conversation. Raises CheckpointError if the template refuses it."""
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise CheckpointError(f"{where}: 'messages' is not a list of objects")
        try:
            self._renderer.connection.send(messages)
            text, fault = self._renderer.connection.recv()
        except (EOFError, OSError) as e:
            fault = "it takes more time or memory than a template needs"
            raise CheckpointError(f"{where}: the model's chat template was ended: {fault}") from e
        if fault is not None:
            raise CheckpointError(
                f"{where}: the model's chat template does not take these messages ({fault})"
            )
        return str(text)


def _template(model: Path, texts: Path) -> tuple[str, dict[str, str]]:
    """The chat template in a model directory, and the special tokens that it may refer to."""
    path = model / "tokenizer_config.json"
    config = {}
    if path.exists():
        refuse_escape(model, path)
        config = read_json(path)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [t for t in source if isinstance(t, dict) and t.get("name") == "default"]
        source = named[-1].get("template") if named else None
    file = model / "chat_template.jinja"
    if file.exists():
        refuse_escape(model, file)
        raw = read_bounded(file, CheckpointError, _MAX_TEMPLATE + 1)
        if len(raw) > _MAX_TEMPLATE:
            raise CheckpointError(
                f"{file}: larger than {_MAX_TEMPLATE} bytes, the largest chat template that is read"
            )
        source = raw.decode("utf-8", "replace")
    if not isinstance(source, str):
        raise CheckpointError(
            f"{texts}: has 'messages', and {model} has no chat template to make text of them; "
            "give lines with a 'text'"
        )
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }
    return source, {k: v for k, v in contents.items() if isinstance(v, str)}


def _answer(connection: Connection, source: str, tokens: Mapping[str, str]) -> None:
    """The process: answer each conversation by its text and None, or by None and a fault."""
    allowed = _SECONDS
    while True:
        try:
            raw = connection.recv_bytes()
        except EOFError:
            return
        allowed += _SECONDS_EACH + _SECONDS_A_BYTE * len(raw)
        # The signal ends the process. Without one more millisecond, 0 would mean no limit.
        signal.setitimer(signal.ITIMER_PROF, max(0.001, allowed - time.process_time()))
        answer = _rendered(pickle.loads(raw), source, tokens)  # of our own process
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(answer)


def _rendered(
    messages: Sequence[Any], source: str, tokens: Mapping[str, str]
) -> tuple[str | None, str | None]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), _ = render_jinja_template([messages], chat_template=source, **tokens)
    except MemoryError:
        return None, "out of memory"
    except Exception as e:  # a template may raise anything
        return None, str(e)[:200]
    if len(text) > _MAX_CHARACTERS:
        return None, f"it makes {len(text)} characters of them, at most {_MAX_CHARACTERS} are taken"
    return str(text), None

"""The tokenizer of a model directory, as vLLM has it: made by transformers.

transformers makes some classes of tokenizers anew, from nothing but the vocabulary in
tokenizer.json. Then their tokens may be others than those that the model was trained with.
"""

import functools
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.engine_files import faults_named
from vllm_gac.checkpoint.headers import version_of
from vllm_gac.checkpoint.hub import cached_id
from vllm_gac.checkpoint.locate import refuse_escape
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize

logger = logging.getLogger(__name__)

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# These classes are what tokenizer.json says, but for these model types. AutoTokenizer makes all
# others; to import it takes seconds.
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
NOT_PLAIN = ("phi3", "qwen2")
_SAMPLE = (
    "def put(self, item, block=True):\n    return self.queue[12345:] != 'It isn\\'t'\n\n"
    "  The quick brown fox: naïve café, Straße, 你好, мир! 🙂\t<b>&amp;</b>\r\n"
)
_UNUSABLE = "not a usable tokenizer"
# A user's words, to see what a chat template makes of them.
_WORDS = "vllmgacwords"
# Of this process's time, which a chat template may take for a conversation: it can loop forever.
_SECONDS = 30.0


class ModelTokenizer:
    """The tokenizer of the model in `model`.

    If its tokens are not those of tokenizer.json, the log says so.

    Args:
        model: The model directory, by the path that vLLM will be given: transformers also looks
            at the path.

    Raises:
        CheckpointError: There is none, or transformers cannot make it.
    """

    def __init__(self, model: Path) -> None:
        self.model = model
        self._tokenizer, fault = _loaded(model)
        if fault is not None:
            _warn_once(fault)

    def ids(self, text: str, *, begins: bool) -> torch.Tensor:
        """The token ids [n] of `text`, with the leading tokens if it `begins` a document."""
        with faults_named(self.model, _UNUSABLE):
            return torch.tensor(_ids(self._tokenizer, text, begins), dtype=torch.int64)

    @functools.cached_property
    def first_token(self) -> int | None:
        """The special token that served prompts begin with, or None.

        It is the one that the tokenizer puts before a text, or else that the chat template begins
        with.
        """
        plain, leading = self.ids("a", begins=False), self.ids("a", begins=True)
        if leading[0] != plain[0]:
            return int(leading[0])
        try:
            text = self.render([{"role": "user", "content": "a"}], None, "")
        except CheckpointError:  # there is no template, or it wants other messages
            return None
        first = self.ids(text, begins=False)[:1].tolist()
        special = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return first[0] if first and first[0] in special else None

    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        ids: dict[str, int] = self._tokenizer.get_vocab()
        return ids

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self._tokenizer.chat_template is not None

    @property
    def start(self) -> int | None:
        """The token that a text begins with, or None."""
        known: int | None = self._tokenizer.bos_token_id
        return self.first_token if known is None else known

    @functools.cached_property
    def special(self) -> tuple[str, ...]:
        """The special tokens, as text."""
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return tuple(token.content for token in added.values() if token.special)

    def user_turn(self) -> tuple[str, str]:
        """What the chat template writes before a user's words, and what it ends them with.

        Raises:
            CheckpointError: It does not write them as they are, or nothing ends them.
        """
        text = self.render([{"role": "user", "content": _WORDS}], None, "a message", asks=True)
        before, *after = text.split(_WORDS)
        rest = after[0].lstrip() if len(after) == 1 else ""
        if not rest:
            raise CheckpointError(
                f"{self.model}: its chat template does not write a user's words once with an end "
                "after them, so the model cannot write them itself; give --prompts"
            )
        special = next((token for token in self.special if rest.startswith(token)), None)
        # The space before a word is a part of its token.
        return before.rstrip(" "), special or rest.split("\n")[0].rstrip()

    def render(self, messages: Any, tools: Any, where: str, *, asks: bool = False) -> str:
        """The text of a conversation, by the model's chat template.

        Args:
            messages: A list of objects, as OpenAI's API has them.
            tools: A list of JSON schemas, or None.
            where: Where the conversation is, for messages.
            asks: Whether the text ends where the model's answer begins.

        Raises:
            CheckpointError: There is no template, it refuses the conversation, takes longer than
                any should, or would print a list, an object or null as Python writes them.
        """
        if not self.has_template:
            raise CheckpointError(
                f"{where}: has 'messages', and {self.model} has no chat template to make text of "
                "them; give rows with a 'text'"
            )
        for name, value in (("messages", messages), ("tools", tools or [])):
            if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
                raise CheckpointError(f"{where}: {name!r} is not a list of objects")
        given = [_message(message, None) for message in messages]
        empty = [_message(message, "") for message in messages]
        try:
            text = self._rendered(given, tools, asks)
            printed = "None" in text and given != empty
            if printed and text.count("None") > self._rendered(empty, tools, asks).count("None"):
                raise TypeError("prints a content that is null as 'None'")
        except Exception as e:  # a template may raise anything
            raise CheckpointError(
                f"{where}: the model's chat template does not take these messages "
                f"({sanitize(e, 400)}); give rows that it takes, or rows with a 'text'"
            ) from e
        return text

    def _rendered(self, messages: list[Any], tools: Any, asks: bool) -> str:
        with _bounded_time():
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=_unprintable(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=asks,
                )
            )


@contextmanager
def _bounded_time() -> Iterator[None]:
    """Raise TimeoutError after `_SECONDS` in user mode, also in the middle of a loop.

    Only the main thread, where every verb renders, can be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"takes more than {_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def has_template(model: Path) -> bool:
    """Whether a model directory has a chat template, by its files alone."""
    template = _read(model / "tokenizer_config.json").get("chat_template")
    return (model / "chat_template.jinja").is_file() or template is not None


def sample_ids(model: Path) -> list[int]:
    """The ids that vLLM gives a text of many kinds of tokens; equal ones show equal tokenizers."""
    tokenizer, _ = _loaded(model)
    return _ids(tokenizer, _SAMPLE, begins=True)


def keep_tokens(source: Path, directory: Path) -> None:
    """Have vLLM make the tokens for `directory` that it makes for `source`.

    transformers exempts some models from a wrong class, by their path, which the other one lacks.

    Args:
        source: A model directory.
        directory: Another one, with its config.json and files of the same tokenizer.

    Raises:
        CheckpointError: No class of a tokenizer gives these tokens.
    """
    if not (source / "tokenizer.json").is_file():
        return
    try:
        expected = sample_ids(source)
    except (CheckpointError, ModuleNotFoundError):
        return  # of what is no tokenizer, nothing is to be kept
    if sample_ids(directory) == expected:
        return
    path = directory / "tokenizer_config.json"
    write_json(path, _read(path) | {"tokenizer_class": PLAIN[0]})
    if sample_ids(directory) != expected:
        raise CheckpointError(
            f"{source / 'tokenizer_config.json'}: gives tokens that no tokenizer_class gives in "
            f"another directory; let it name {PLAIN[0]}, and tokenizer.json say all"
        )


def _loaded(model: Path) -> tuple[Any, str | None]:
    """transformers' tokenizer of a model directory, and what its tokens have wrong, if anything."""
    for name in _FILES:
        if os.path.lexists(model / name):
            refuse_escape(model, model / name)
    if not (path := model / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{path}: missing, and needed to read text; of a tokenizer.model, transformers writes "
            f"one: AutoTokenizer.from_pretrained({str(model)!r}).save_pretrained(...)"
        )
    paths = (model / name for name in ("config.json", *_FILES))
    return _made(model, *(version_of(path.stat()) if path.is_file() else None for path in paths))


@functools.lru_cache(maxsize=4)
def _made(model: Path, *_versions: tuple[int, int] | None) -> tuple[Any, str | None]:
    """The same; of a large vocabulary it takes seconds, and a verb asks for it several times."""
    config, said = (_read(model / name) for name in ("config.json", "tokenizer_config.json"))
    plain = said.get("tokenizer_class") in PLAIN and config.get("model_type") not in NOT_PLAIN
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    with faults_named(model, _UNUSABLE):
        if plain or not config:
            from transformers import PreTrainedTokenizerFast

            made = PreTrainedTokenizerFast.from_pretrained(str(model), **options)
        else:
            from transformers import AutoConfig, AutoTokenizer

            if (known := cached_id(model)) is not None:
                options["config"] = AutoConfig.from_pretrained(str(model))
                options["config"].name_or_path = known[0]
            made = AutoTokenizer.from_pretrained(str(model), mistral_format=False, **options)
        made.backend_tokenizer.no_truncation()
        made.backend_tokenizer.no_padding()
        return made, _fault(model, made)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _fault(model: Path, tokenizer: Any) -> str | None:
    """A sentence if `tokenizer` makes other tokens of text than tokenizer.json says."""
    from tokenizers import Tokenizer

    written = Tokenizer.from_file(str(model / "tokenizer.json"))
    written.no_truncation()
    written.no_padding()
    expected = written.encode(_SAMPLE, add_special_tokens=False).ids
    encoded = _ids(tokenizer, _SAMPLE, begins=False)
    if encoded == expected:
        return None
    pairs = enumerate(zip(encoded, expected, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), 0)
    theirs, ours = (
        tokenizer.convert_ids_to_tokens(ids[at : at + 4]) for ids in (encoded, expected)
    )
    return (
        f"{model / 'tokenizer_config.json'}: transformers, hence vLLM, makes other tokens of text "
        f"than tokenizer.json: {sanitize(theirs)}, not {sanitize(ours)}; if the model was trained "
        'with those of tokenizer.json, write "tokenizer_class": "PreTrainedTokenizerFast"'
    )


def _ids(tokenizer: Any, text: str, begins: bool) -> list[int]:
    # transformers holds the GIL meanwhile and computes offsets; this does neither.
    backend = tokenizer.backend_tokenizer
    (encoded,) = backend.encode_batch_fast([text], add_special_tokens=begins)
    return list(encoded.ids)


@functools.cache
def _warn_once(fault: str) -> None:
    logger.warning("%s", fault)


class _List(list[Any]):
    """A list that a template may walk through, and not print."""

    def __str__(self) -> str:
        raise TypeError("prints a list as Python writes it")


class _Object(dict[str, Any]):
    """The same of an object."""

    def __str__(self) -> str:
        raise TypeError("prints an object as Python writes it")


def _unprintable(value: Any) -> Any:
    """`value` without nulls in objects: a table has them where a row has no such key."""
    if isinstance(value, dict):
        return _Object({k: _unprintable(v) for k, v in value.items() if v is not None})
    return _List(map(_unprintable, value)) if isinstance(value, list) else value


def _message(message: Mapping[str, Any], null: str | None) -> dict[str, Any]:
    """A message to render, with `null` for a content that is null: templates ask for that."""
    made: dict[str, Any] = _unprintable(message)
    return _Object(made, content=null) if message.get("content", "") is None else made

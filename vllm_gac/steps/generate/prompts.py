"""What a model is asked: conversations that end with a user's words, or the beginnings of texts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gac.errors import CheckpointError
from vllm_gac.texts.text_files import has_rows, plain_text, rows
from vllm_gac.texts.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked.

    Attributes:
        where: Its file, and the line or row.
        row: As in a text: "messages", and perhaps "tools", or a "text".
    """

    where: str
    row: Mapping[str, Any]

    @classmethod
    def of_words(cls, words: str, *, chat: bool, where: str = "") -> "Prompt":
        """A user's `words`, or without `chat` the beginning of a text."""
        message = {"role": "user", "content": words}
        return cls(where, {"messages": [message]} if chat else {"text": words})

    def ids(self, tokenizer: ModelTokenizer) -> list[int]:
        """The token ids [n] that the model goes on from.

        Raises CheckpointError naming the row if it has no prompt, or none that can be written.
        """
        if not self.row:
            need = ", or 'messages' with one of a user" * tokenizer.has_template
            raise CheckpointError(f"{self.where}: no prompt; each row needs a 'text'{need}")
        try:
            json.dumps(self.row, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as e:  # such as half of a character
            raise CheckpointError(f"{self.where}: cannot be written as JSON ({e})") from e
        if (messages := self.row.get("messages")) is None:
            text: str = self.row["text"]
            return tokenizer.ids(text, begins=True).tolist() if text else _start(tokenizer)
        text = tokenizer.render(messages, self.row.get("tools"), self.where, asks=True)
        return tokenizer.ids(text, begins=False).tolist()

    def answered(self, answer: str) -> dict[str, Any]:
        """The row of a text with what the model wrote."""
        if (messages := self.row.get("messages")) is None:
            return {"text": self.row["text"] + answer}
        said = {"role": "assistant", "content": answer}
        return {**self.row, "messages": [*messages, said]}


def read_prompts(tokenizer: ModelTokenizer, files: Sequence[Path]) -> Iterator[Prompt]:
    """The prompts of files: a line of plain text, or a row's "text", or its "messages".

    Of a conversation, what follows the user's last words is left out. A model without a chat
    template goes on with a "text". Where a row has none of these, the prompt's row is empty.

    Raises:
        CheckpointError: A file cannot be read.
    """
    for path in files:
        if has_rows(path):
            for where, row in rows(path):
                yield _prompt_of(row, where, chat=tokenizer.has_template)
        else:
            with plain_text(path) as file:
                for number, line in enumerate(file, 1):
                    if words := line.strip():
                        where = f"{path}:{number}"
                        yield Prompt.of_words(words, chat=tokenizer.has_template, where=where)


def _prompt_of(row: Mapping[str, Any], where: str, *, chat: bool) -> Prompt:
    messages, text = row.get("messages"), row.get("text")
    if isinstance(text, str) and text.strip():
        return Prompt.of_words(text, chat=chat, where=where)
    if isinstance(messages, list) and chat:
        roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages]
        if "user" in roles:
            asked = messages[: len(roles) - roles[::-1].index("user")]
            tools = {"tools": row["tools"]} if row.get("tools") else {}
            return Prompt(where, {"messages": asked, **tools})
    return Prompt(where, {})


def _start(tokenizer: ModelTokenizer) -> list[int]:
    if (start := tokenizer.start) is None:
        raise CheckpointError(
            f"{tokenizer.model}: has neither a chat template nor a token that texts begin with, so "
            "it cannot write by itself; give --prompts with the beginnings of texts"
        )
    return [start]

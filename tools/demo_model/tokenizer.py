"""A byte-level BPE tokenizer for Python sources. transformers' AutoTokenizer can load it."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer

VOCAB_SIZE = 4096
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
BOS_ID, EOS_ID = 0, 1
_ENCODED_AT_ONCE = 1024

# The model is trained on modules, not on dialogues. So a conversation becomes a module: the user's
# messages are docstrings, and the assistant's messages are code. It begins like a document of
# corpus.py.
_CHAT_TEMPLATE = (
    "{{ bos_token + '# Lib/__main__.py\n' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + '\n\n' }}"
    "{% else %}"
    "{{ '\"\"\"' + message['content'] | trim + '\n\"\"\"\n\n' }}"
    "{% endif %}"
    "{% endfor %}"
)


def token_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> torch.Tensor:
    """All `texts` as one stream of ids [n], int16. Each is between a begin and an end token."""
    every, parts = list(texts), [torch.empty(0, dtype=torch.int16)]
    # Encodings and lists of ids take dozens of bytes a token, so few of them exist at once.
    for start in range(0, len(every), _ENCODED_AT_ONCE):
        for encoding in tokenizer.encode_batch_fast(every[start : start + _ENCODED_AT_ONCE]):
            parts.append(torch.tensor([*encoding.ids, EOS_ID], dtype=torch.int16))
    return torch.cat(parts)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. `context` is the model's longest input."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")

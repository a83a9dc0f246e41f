"""The prompts and the held-out text by which engines that serve the demo model are compared."""

from tokenizers import Tokenizer

from vllm_gac import demo

PROMPTS = ("def __init__(self", "import os\n", "class Node:\n", "    for i in range(", "try:\n")
COMPLETION_TOKENS = 64
TEXT_TOKENS, WINDOW = 3600, 900


def prompts() -> list[list[int]]:
    """Token ids of PROMPTS."""
    tokenizer = _tokenizer()
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def held_out_tokens() -> list[int]:
    """Token ids of the first TEXT_TOKENS tokens of the held-out text."""
    ids: list[int] = _tokenizer().encode(demo.HELD_OUT.read_text()).ids
    return ids[:TEXT_TOKENS]


def windows() -> list[list[int]]:
    """The held-out tokens in windows of WINDOW tokens, which are scored one by one."""
    text = held_out_tokens()
    return [text[i : i + WINDOW] for i in range(0, len(text), WINDOW)]


def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))

"""Tasks over long contexts that need no download: finding a needle, and copying.

Both are scored in one forward pass: a token of the answer counts as right if it is the most likely
one after the text before it, which is what greedy decoding would write.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from tools.demo_model.tokenizer import BOS_ID
from vllm_gac.errors import GacError

_DEPTHS = 8
# So many tokens of the second copy only say which text is repeated.
_CUE = 16
_TOKENS_AT_ONCE = 1 << 13


@dataclass(frozen=True, slots=True)
class Questions:
    """Sequences `tokens` [count, length], and which tokens of each are its answer (bool)."""

    tokens: Tensor
    answers: Tensor


def needles(tokenizer: Tokenizer, filler: Tensor, length: int, count: int) -> Questions:
    """Ask for a number that was assigned to a name somewhere in `length` tokens of other text.

    The assignment lies at one of _DEPTHS evenly spaced depths, in turn. The question, which ends
    the sequence, is `assert NAME == `; the answer is the number, of six digits.

    Args:
        tokenizer: Of the model.
        filler: Token ids [n] of the text around the needle; sequences take different parts of it.
        length: Tokens of a sequence, with the answer.
        count: Sequences.
    """
    rng = random.Random(0)
    rows, answers = [], []
    for index in range(count):
        name = "KEY_" + "".join(rng.choices(string.ascii_uppercase, k=5))
        number = "".join(rng.choices(string.digits, k=6))
        needle, question, answer = (
            tokenizer.encode(text, add_special_tokens=False).ids
            for text in (f"\n{name} = {number}\n", f"\nassert {name} == ", number)
        )
        room = length - 1 - len(needle) - len(question) - len(answer)
        around = _part(filler, index, count, room)
        at = int(room * (index % _DEPTHS + 0.5) / _DEPTHS)
        rows.append([BOS_ID, *around[:at], *needle, *around[at:], *question, *answer])
        answers.append([False] * (length - len(answer)) + [True] * len(answer))
    return Questions(torch.tensor(rows), torch.tensor(answers))


def copies(filler: Tensor, length: int, count: int) -> Questions:
    """Repeat half of `length` tokens of text; the answer is the second copy, but for its start."""
    half = (length - 1) // 2
    rows = []
    for index in range(count):
        part = _part(filler, index, count, half)
        rows.append([BOS_ID, *part, *part])
    answers = torch.zeros(count, 1 + 2 * half, dtype=torch.bool)
    answers[:, 1 + half + _CUE :] = True
    return Questions(torch.tensor(rows), answers)


def _part(filler: Tensor, index: int, count: int, length: int) -> list[int]:
    """`length` tokens of `filler`; the parts of different indices begin evenly spread over it."""
    if len(filler) < length:
        raise GacError(f"{len(filler)} tokens of held-out text, too few for a part of {length}")
    start = (len(filler) - length) * index // count
    part: list[int] = filler[start : start + length].tolist()
    return part


@torch.inference_mode()
def score(logits_of: Callable[[Tensor], Tensor], questions: Questions) -> dict[str, float]:
    """How well `logits_of` (ids [batch, length] to logits [batch, length, vocab]) answers.

    Returns:
        `exact`, the share of sequences of which every token of the answer is right; `right`, the
        share of right tokens; and `nats`, the mean cross entropy of a token of the answer.
    """
    exact = right = nats = 0.0
    at_once = max(1, _TOKENS_AT_ONCE // questions.tokens.shape[1])
    batches = (tensor.split(at_once) for tensor in (questions.tokens, questions.answers))
    for tokens, answers in zip(*batches, strict=True):
        logits = logits_of(tokens)[:, :-1].float()
        targets, asked = tokens[:, 1:].to(logits.device), answers[:, 1:].to(logits.device)
        hits = logits.argmax(-1) == targets
        exact += (hits | ~asked).all(-1).sum().item()
        right += hits[asked].sum().item()
        nats += cross_entropy(logits[asked], targets[asked], reduction="sum").item()
    answered = int(questions.answers.sum())
    return {
        "exact": exact / len(questions.tokens),
        "right": right / answered,
        "nats": nats / answered,
    }

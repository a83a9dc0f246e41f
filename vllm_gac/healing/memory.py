"""How much of a GPU's memory a healing needs, and what is trained if that is not said.

A trained number takes 16 bytes: itself, its gradient and Adam's two averages, each in fp32. All
other weights lie there as they are stored, and so does the teacher.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_gac.errors import HealingError
from vllm_gac.healing.distillation import PIECE
from vllm_gac.healing.student import is_trained
from vllm_gac.healing.train import MICRO_TOKENS
from vllm_gac.layout.dims import LINEARS, ModelLayout

_TRAINED = 16
# Hidden states and MLP activations of a layer that exist at once when it runs backward, and logits.
_STATES, _CHANNELS, _LOGITS = 16, 8, 6
# What torch and its libraries take, and gaps between allocations.
_SHARE_TO_USE = 0.94


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device.

    Attributes:
        trained: Numbers that are trained, with gradients and averages.
        weights: Weights of the student that lie there beside them.
        teacher: Weights of the teacher.
        activations: Hidden states, logits, and one layer's weights and gradients.
    """

    trained: int
    weights: int
    teacher: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.trained + self.weights + self.teacher + self.activations

    def described(self) -> str:
        """The sum, and what it is made of."""
        parts = (
            (self.trained, "for what is trained"),
            (self.weights, "other weights"),
            (self.teacher, "the teacher"),
            (self.activations, "activations"),
        )
        return f"{_giga(self.total)} GB: " + ", ".join(f"{_giga(b)} {what}" for b, what in parts)


def memory(
    student: ModelLayout,
    teacher: ModelLayout,
    weight_bytes: tuple[int, int],
    length: int,
    adapter_rank: int | None,
) -> Memory:
    """The memory that healing needs.

    Args:
        student: The layout of the model that is healed.
        teacher: The layout of the dense model.
        weight_bytes: Bytes of one stored weight of the student, and of the teacher.
        length: Tokens of one sequence.
        adapter_rank: The rank of adapters; None: all weights of the layers are trained.
    """
    shapes = student.tensors()
    trained = sum(math.prod(s) for n, s in shapes.items() if is_trained(n))
    fixed = sum(math.prod(s) for n, s in shapes.items() if not is_trained(n))
    if adapter_rank is not None:
        fixed = sum(map(math.prod, shapes.values()))
        trained = _adapter_numbers(shapes, adapter_rank)
    return Memory(
        trained=_TRAINED * trained,
        weights=weight_bytes[0] * fixed,
        teacher=weight_bytes[1] * teacher.parameters,
        activations=_activations(student, teacher, max(length, MICRO_TOKENS)),
    )


def chosen_rank(
    asked: str, adapter_rank: int, whole: Memory, adapters: Memory, free: int | None
) -> int | None:
    """The rank of the adapters to train, or None to train all weights of the layers.

    Args:
        asked: "whole", "lora", or "auto": all weights if there is room for them.
        adapter_rank: The rank if adapters are trained.
        whole: What training all weights needs.
        adapters: What training adapters needs.
        free: Free bytes of the device; None: its memory is the host's, and is not looked at.

    Raises:
        HealingError: What was asked for does not fit.
    """
    room = math.inf if free is None else _SHARE_TO_USE * free
    if asked != "lora" and whole.total <= room:
        return None
    if asked != "whole" and adapters.total <= room:
        return adapter_rank
    needed, hint = adapters, "heal on a larger GPU"
    if asked == "whole":
        needed = whole
        hint += f", or give --train lora, which takes {_giga(adapters.total)} GB"
    raise HealingError(
        f"too little memory: healing needs {needed.described()}; {_giga(int(room))} GB of the "
        f"GPU's are free to use; shorter sequences need less, or {hint}"
    )


def _adapter_numbers(shapes: Mapping[str, tuple[int, ...]], rank: int) -> int:
    count = 0
    for name, shape in shapes.items():
        if is_trained(name) and len(shape) == 1:
            count += shape[0]
        elif is_trained(name):
            *heads, rows, columns = shape
            count += math.prod(heads) * min(rank, rows, columns) * (rows + columns)
    return count


def _activations(student: ModelLayout, teacher: ModelLayout, tokens: int) -> int:
    hidden, layers = student.hidden_size, len(student.layers)
    width = max(layer.intermediate_size for layer in (*student.layers, *teacher.layers))
    largest = sum(math.prod(teacher.linear_shape(teacher.layers[0], name)) for name in LINEARS)
    states = 4 * tokens * (2 * layers * hidden + _STATES * hidden + _CHANNELS * width)
    head = 4 * (_LOGITS * PIECE + 2 * student.vocab_size * hidden)
    return states + head + 12 * largest


def _giga(count: int) -> str:
    return f"{count / 1e9:.1f}"

"""How much memory a healing needs, and what is trained if that is not said.

A trained number takes 16 bytes of the GPU: itself, its gradient and Adam's two moments, each in
fp32. All other weights lie on the GPU as they are stored, and so does the teacher. Where several
processes heal together, each GPU has its shard of all but embeddings and activations.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_gac.errors import HealingError
from vllm_gac.healing.distillation import PIECE
from vllm_gac.healing.student import may_change
from vllm_gac.layout.dims import LINEARS, ModelLayout

_TRAINED = 16
# Hidden states and MLP activations of a layer that exist at once when it runs backward, and logits.
_STATES, _CHANNELS, _LOGITS = 16, 8, 6
# A layer's weights in two dtypes and its gradients; and, of those that are shared, the layers on
# their way, and their gradients. At Llama-3-8B's shape one GPU and two took 4 to 10 GB less than is
# expected so (docs/decisions.md, Healing).
_LAYER, _SENT = 12, 48
# Bytes of a token's activations in a layer that keeps them, for each number of its hidden state and
# each channel of its MLP (tests/healing/test_memory.py counts them).
_KEPT_STATE, _KEPT_CHANNEL = 32, 7
# What they may take of the bytes that are left.
_SHARE_TO_KEEP = 0.9
# What torch and its libraries take, and gaps between allocations.
_SHARE_TO_USE = 0.94
# Tokens that run forward and backward at once, and the part of a GPU that more of them may take.
_LEAST_AT_ONCE, _MOST_AT_ONCE, _PART_AT_ONCE = 1 << 13, 1 << 16, 8


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device.

    Attributes:
        trained: Numbers that are trained, with gradients and moments.
        weights: Weights of the student that lie there beside them.
        teacher: Weights of the teacher.
        activations: Hidden states; and the logits, or what one layer has when it runs backward.
    """

    trained: int
    weights: int
    teacher: int
    activations: int

    @property
    def total(self) -> int:
        """All on the device."""
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


def tokens_at_once(student: ModelLayout, teacher: ModelLayout, gpu: tuple[int, int] | None) -> int:
    """How many tokens run forward and backward at once.

    The host launches hundreds of kernels for each layer, however many tokens there are. 8,192 are
    enough for a model of billions of weights; of a smaller one the GPU has computed them before the
    host has launched the rest.

    Args:
        student: The layout of the model that is healed.
        teacher: The layout of the dense model.
        gpu: Its bytes, those that are free and all; None: the model is healed on a CPU.

    Returns:
        From 8,192 to 65,536: as many as have their states in an eighth of the GPU, or 8,192 if
        less than half of it is free. It follows from all bytes, and not from the free ones, because
        a run that goes on is to add in the same order.
    """
    if gpu is None or 2 * gpu[0] < gpu[1]:
        return _LEAST_AT_ONCE
    fitting = gpu[1] // _PART_AT_ONCE // sum(_state_bytes(student, teacher))
    return min(max(fitting, _LEAST_AT_ONCE), _MOST_AT_ONCE)


def memory(
    student: ModelLayout,
    teacher: ModelLayout,
    weight_bytes: tuple[int, int],
    tokens: int,
    adapter_rank: int | None,
    processes: int = 1,
    trained: Callable[[str], bool] = may_change,
) -> Memory:
    """The memory that healing needs.

    Args:
        student: The layout of the model that is healed.
        teacher: The layout of the dense model.
        weight_bytes: Bytes of one stored weight of the student, and of the teacher.
        tokens: Tokens that run at once.
        adapter_rank: The rank of adapters; None: whole weights are trained.
        processes: How many GPUs share the layers.
        trained: Whether a tensor is trained, of those that `may_change`.
    """
    shapes = student.tensors()
    layers = {name: shape for name, shape in shapes.items() if may_change(name)}
    weights = {name: shape for name, shape in layers.items() if trained(name)}
    outside = _numbers(shapes) - _numbers(layers)
    fixed = _numbers(layers) - (_numbers(weights) if adapter_rank is None else 0)
    embeddings = (
        (1 if teacher.tie_word_embeddings else 2) * teacher.vocab_size * teacher.hidden_size
    )
    shared = (teacher.parameters - embeddings) // processes
    return Memory(
        trained=_TRAINED * _numbers(weights, adapter_rank) // processes,
        weights=weight_bytes[0] * (outside + fixed // processes),
        teacher=weight_bytes[1] * (embeddings + shared),
        activations=_activations(student, teacher, tokens, processes),
    )


def kept_layers(student: ModelLayout, needed: Memory, tokens: int, free: int | None) -> int:
    """How many layers keep their activations for the backward pass, where the rest run again.

    Args:
        student: The layout of the model that is healed.
        needed: What healing needs if all layers run again.
        tokens: Tokens that run at once.
        free: Free bytes of the GPU; None: the model is healed on a CPU, and all run again.
    """
    if free is None:
        return 0
    width = max(layer.intermediate_size for layer in student.layers)
    weights = 2 * max(
        sum(math.prod(student.linear_shape(layer, name)) for name in LINEARS)
        for layer in student.layers
    )
    layer = tokens * (_KEPT_STATE * student.hidden_size + _KEPT_CHANNEL * width) + weights
    room = int(_SHARE_TO_USE * free) - needed.total
    return min(max(int(_SHARE_TO_KEEP * room / layer), 0), len(student.layers))


def chosen_rank(
    requested: str, adapter_rank: int, full: Memory, adapters: Memory, free: int | None
) -> int | None:
    """The rank of the adapters to train, or None to train all weights of the layers.

    Args:
        requested: "full", "lora", or "auto": all weights if there is room for them.
        adapter_rank: The rank if adapters are trained.
        full: What training all weights needs.
        adapters: What training adapters needs.
        free: Free bytes of the device; None: its memory is the host's, and is not looked at.

    Raises:
        HealingError: What was asked for does not fit.
    """
    room = math.inf if free is None else _SHARE_TO_USE * free
    if requested != "lora" and full.total <= room:
        return None
    if requested != "full" and adapters.total <= room:
        return adapter_rank
    needed, hints = adapters, ["heal on a larger GPU"]
    if requested == "full":
        needed = full
        hints.append(f"give --train lora, which takes {_giga(adapters.total)} GB")
    raise HealingError(
        f"too little memory: healing needs {needed.described()}; {_giga(int(room))} GB of the "
        f"GPU's are free to use; shorter sequences need less, or {', or '.join(hints)}"
    )


def _numbers(shapes: Mapping[str, tuple[int, ...]], rank: int | None = None) -> int:
    """The numbers of tensors, or of their adapters of a rank, which vectors do not have."""
    count = 0
    for shape in shapes.values():
        if rank is None or len(shape) == 1:
            count += math.prod(shape)
        else:
            *heads, rows, columns = shape
            count += math.prod(heads) * min(rank, rows, columns) * (rows + columns)
    return count


def _activations(student: ModelLayout, teacher: ModelLayout, tokens: int, processes: int) -> int:
    """The states that are kept; and beside them the logits or a layer, which come in turn."""
    largest = sum(math.prod(teacher.linear_shape(teacher.layers[0], name)) for name in LINEARS)
    weights = (_LAYER if processes == 1 else _LAYER + _SENT) * largest
    logits = 4 * (_LOGITS * PIECE + 2 * student.vocab_size * student.hidden_size)
    kept, in_a_layer = (tokens * count for count in _state_bytes(student, teacher))
    return kept + max(logits, in_a_layer + weights)


def _state_bytes(student: ModelLayout, teacher: ModelLayout) -> tuple[int, int]:
    """Bytes of the hidden states that are kept of one token, and of what a layer computes of it."""
    hidden, layers = student.hidden_size, len(student.layers)
    width = max(layer.intermediate_size for layer in (*student.layers, *teacher.layers))
    return 4 * 2 * layers * hidden, 4 * (_STATES * hidden + _CHANNELS * width)


def _giga(count: int) -> str:
    return f"{count / 1e9:.1f}"

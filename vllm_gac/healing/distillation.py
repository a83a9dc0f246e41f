"""How far a compressed model is from the dense model that it was made of.

Both run side by side, layer after layer. The loss that is minimized is the Kullback-Leibler
divergence of the predictions (Hinton, Vinyals and Dean, 2015). No activation inside a layer is kept
for the backward pass: layers run again (Chen et al., 2016), and so does the unembedding, in pieces.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.checkpoint import checkpoint

from vllm_gac.checkpoint.layer_shards import read_layer
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed,
    layer_forward,
    unembed,
)
from vllm_gac.healing.guard import Score
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.sharded_module import ShardedModule

Tensor = torch.Tensor
# Logits of one piece of the unembedding: 256 MB in fp32.
PIECE = 1 << 26


class Weights(Protocol):
    """The weights of a model on a device: a Student or a Teacher."""

    layers: list[ShardedModule]

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored; those of a layer while the layer's module is called."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model on a device."""

    reference: Reference
    weights: Weights


@dataclass(frozen=True, slots=True)
class Distillation:
    """A student, its teacher, and the distance between them.

    Where several processes heal together, all of them call a method at the same time.

    Attributes:
        student: The model that is trained.
        teacher: The dense model. It has as many layers, and hidden states of the same size.
        rest: What is trained beside the student's layers.
        processes: Those that heal together.
        mixed: Whether matrix products are computed in bf16. All else is in fp32.
        tokens_at_once: How many tokens a caller gives to `loss`, and `score` computes at once.
    """

    student: Model
    teacher: Model
    rest: ShardedModule
    processes: Processes
    mixed: bool
    tokens_at_once: int

    def loss(self, tokens: Tensor) -> Tensor:
        """The loss of `tokens` [count, length], summed over all tokens, to be minimized."""
        loss: Tensor = self.rest(self._loss, tokens)
        return loss

    def _loss(self, tokens: Tensor) -> Tensor:
        with self._precision():
            student, teacher = self._leaving(tokens)
            total = torch.zeros((), device=student.device)
            for ours, theirs in self._pieces(student, teacher):
                total = total + _activation_checkpoint(self._divergence_of_piece, ours, theirs)
        return total

    def score(self, tokens: Tensor) -> tuple[Score, float]:
        """The student's score on `tokens` [count, length], and the teacher's loss.

        The processes share the tokens. Logits are computed in fp32 here, because rounded ones would
        hide small divergences.
        """
        share = math.ceil(len(tokens) / self.processes.count) * tokens.shape[1]
        parts = list(batches(tokens, min(self.tokens_at_once, share)))
        sums = torch.zeros(3, dtype=torch.float64)
        for first in range(0, len(parts), self.processes.count):
            number = first + self.processes.rank
            # One for whom none is left computes with the others, who need its share of the weights.
            partial_sums = self.rest(self._sums, parts[min(number, len(parts) - 1)])
            sums += partial_sums if number < len(parts) else 0
        sums = self.processes.summed(sums)
        divergence, loss, teacher_loss = (sums / (tokens.numel() - len(tokens))).tolist()
        return Score(divergence, loss), teacher_loss

    @torch.no_grad()
    def _sums(self, tokens: Tensor) -> Tensor:
        """The divergence, the student's loss and the teacher's, summed over `tokens`, in fp64."""
        sums = torch.zeros(3, dtype=torch.float64)
        with self._precision():
            student, teacher = self._leaving(tokens)
        heads = [self._head(model, torch.float32) for model in (self.student, self.teacher)]
        targets = tokens[:, 1:].flatten().to(student.device)
        for ours, theirs, wanted in self._pieces(student[:, :-1], teacher[:, :-1], targets):
            ours = unembed(self.student.reference, heads[0], ours)
            theirs = unembed(self.teacher.reference, heads[1], theirs)
            batch_sums = (
                _divergence(ours, theirs),
                cross_entropy(ours, wanted, reduction="sum"),
                cross_entropy(theirs, wanted, reduction="sum"),
            )
            sums += torch.stack(batch_sums).double().cpu()
        return sums

    def _leaving(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [count, length, hidden] after the last layer of student and teacher."""
        student, teacher = (
            embed(model.reference, model.weights.tensor, tokens)
            for model in (self.student, self.teacher)
        )
        for index in range(len(self.student.reference.layout.layers)):
            theirs, ours = (model.weights.layers[index] for model in (self.teacher, self.student))
            with torch.no_grad():
                teacher = theirs(self._layer, self.teacher, index, teacher)
            student = ours(_activation_checkpoint, self._layer, self.student, index, student)
        return student, teacher

    def _layer(self, model: Model, index: int, hidden: Tensor) -> Tensor:
        reference = model.reference
        weights = read_layer(reference.layout, model.weights.tensor, index)
        if not self.mixed:
            weights = {name: weight.float() for name, weight in weights.items()}
        return layer_forward(reference, reference.layout.layers[index], weights, hidden)

    def _divergence_of_piece(self, student: Tensor, teacher: Tensor) -> Tensor:
        dtype = None if self.mixed else torch.float32
        ours = unembed(self.student.reference, self._head(self.student, dtype), student)
        with torch.no_grad():
            theirs = unembed(self.teacher.reference, self._head(self.teacher, dtype), teacher)
        return _divergence(ours.float(), theirs.float())

    def _head(self, model: Model, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """The last norm and the unembedding; as they are stored if `dtype` is None."""
        tied = model.reference.layout.tie_word_embeddings
        unembedding = model.weights.tensor(
            "model.embed_tokens.weight" if tied else "lm_head.weight"
        )
        norm = model.weights.tensor("model.norm.weight")
        return (norm, unembedding) if dtype is None else (norm.to(dtype), unembedding.to(dtype))

    def _pieces(self, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows of the parts (all dims but the last), in chunks that bound the memory of logits."""
        rows = max(1, PIECE // self.student.reference.layout.vocab_size)
        flat = (p.flatten(0, -2) if p.ndim > 1 else p for p in parts)
        return zip(*(torch.split(part, rows) for part in flat), strict=True)

    def _precision(self) -> AbstractContextManager[object]:
        # Without the cache, bf16 copies of all weights are not held until the context ends.
        kind = self.student.reference.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.mixed, cache_enabled=False)


def _activation_checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that keeps nothing for the backward pass, where it is called again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of logits [tokens, vocab], summed."""
    ours, theirs = (torch.log_softmax(x, -1) for x in (student, teacher))
    return kl_div(ours, theirs, reduction="sum", log_target=True)

"""How far a compressed model is from the dense model that it was made of.

Both run side by side, layer after layer. The loss that is minimized is the Kullback-Leibler
divergence of the predictions, softened by a temperature (Hinton, Vinyals and Dean, 2015), and a
share of the distance between the hidden states that leave each layer (as in Minitron: Muralidharan
et al., NeurIPS 2024). No activation inside a layer is kept for the backward pass: layers run again
(Chen et al., 2016), and so does the unembedding, in pieces.
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
        temperature: What logits are divided by before they are compared.
        hidden_weight: The weight of the distance between hidden states.
        mixed: Whether matrix products are computed in bf16. All else is in fp32.
        tokens_at_once: How many tokens a caller gives to `loss`, and `score` computes at once.
    """

    student: Model
    teacher: Model
    rest: ShardedModule
    processes: Processes
    temperature: float
    hidden_weight: float
    mixed: bool
    tokens_at_once: int

    def loss(self, tokens: Tensor) -> Tensor:
        """The loss of `tokens` [count, length], summed over all tokens, to be minimized."""
        loss: Tensor = self.rest(self._loss, tokens)
        return loss

    def _loss(self, tokens: Tensor) -> Tensor:
        with self._precision():
            student, teacher, distance = self._leaving(tokens)
            divergence = self._divergence(student, teacher)
        layers = len(self.student.reference.layout.layers)
        return divergence + self.hidden_weight * distance / layers

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
            student, teacher, _ = self._leaving(tokens)
        heads = [self._head(model, torch.float32) for model in (self.student, self.teacher)]
        targets = tokens[:, 1:].flatten().to(student.device)
        for ours, theirs, wanted in self._pieces(student[:, :-1], teacher[:, :-1], targets):
            ours = unembed(self.student.reference, heads[0], ours)
            theirs = unembed(self.teacher.reference, heads[1], theirs)
            batch_sums = (
                _softened_divergence(ours, theirs, 1.0),
                cross_entropy(ours, wanted, reduction="sum"),
                cross_entropy(theirs, wanted, reduction="sum"),
            )
            sums += torch.stack(batch_sums).double().cpu()
        return sums

    def _leaving(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [count, length, hidden] after the last layer of student and teacher.

        The third is the distance of those that leave every layer, summed over layers and tokens.
        """
        student, teacher = (
            embed(model.reference, model.weights.tensor, tokens)
            for model in (self.student, self.teacher)
        )
        total = torch.zeros((), device=student.device)
        for index in range(len(self.student.reference.layout.layers)):
            theirs, ours = (model.weights.layers[index] for model in (self.teacher, self.student))
            with torch.no_grad():
                teacher = theirs(self._layer, self.teacher, index, teacher)
            target = teacher if self.hidden_weight else None
            student, distance = ours(
                _activation_checkpoint, self._student_layer, index, student, target
            )
            total = total + distance
        return student, teacher, total

    def _student_layer(
        self, index: int, hidden: Tensor, target: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden = self._layer(self.student, index, hidden)
        if target is None:
            return hidden, hidden.new_zeros(())
        return hidden, _distance(hidden, target)

    def _layer(self, model: Model, index: int, hidden: Tensor) -> Tensor:
        reference = model.reference
        weights = read_layer(reference.layout, model.weights.tensor, index)
        if not self.mixed:
            weights = {name: weight.float() for name, weight in weights.items()}
        return layer_forward(reference, reference.layout.layers[index], weights, hidden)

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """The softened divergence of the predictions, summed over tokens."""
        total = torch.zeros((), device=student.device)
        for ours, theirs in self._pieces(student, teacher):
            total = total + _activation_checkpoint(self._divergence_of_piece, ours, theirs)
        return total

    def _divergence_of_piece(self, student: Tensor, teacher: Tensor) -> Tensor:
        dtype = None if self.mixed else torch.float32
        ours = unembed(self.student.reference, self._head(self.student, dtype), student)
        with torch.no_grad():
            theirs = unembed(self.teacher.reference, self._head(self.teacher, dtype), teacher)
        return _softened_divergence(ours.float(), theirs.float(), self.temperature)

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


def _distance(hidden: Tensor, target: Tensor) -> Tensor:
    """The squared distance relative to the target's square, token by token, and summed.

    Relative, because some tokens have activations that are hundreds of times as large.
    """
    return ((hidden - target).square().sum(-1) / target.square().sum(-1)).sum()


def _softened_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of logits [tokens, vocab] at a temperature T, times T^2, summed.

    With T^2, gradients are of the same size at every temperature (Hinton et al., section 2).
    """
    ours, theirs = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
    return temperature**2 * kl_div(ours, theirs, reduction="sum", log_target=True)

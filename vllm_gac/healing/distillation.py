"""How far a compressed model is from the dense model that it was made of.

Both run side by side, layer after layer. The loss that is minimized is the Kullback-Leibler
divergence of the predictions (Hinton, Vinyals and Dean, 2015). It is computed together with its
gradient, in chunks of tokens, so that no logits are kept or computed twice. Activations inside a
layer are kept for the backward pass as far as there is room, else the layer runs again (Chen et
al., 2016).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import kl_div, linear, nll_loss
from torch.utils.checkpoint import checkpoint

from vllm_gac.checkpoint.layer_shards import read_layer
from vllm_gac.compression.reference_model import Reference, batches, embed, last_norm, layer_forward
from vllm_gac.healing.guard import Score
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.sharded_module import ShardedModule
from vllm_gac.healing.student import Student, Teacher

Tensor = torch.Tensor
# Logits of one chunk of tokens: 256 MB in fp32.
PIECE = 1 << 26
# Rows of a tile of a GPU's matrix product: a chunk has whole tiles.
_TILE = 128
# So many tokens of a sequence, or a share of a short one, are read, but what they predict does not
# count. Some of them have massive activations (Sun et al., 2024), which a late layer takes away
# again. If a step changes these, such a token diverges by 20 nats and more, which hides all others;
# and nobody needs what it predicts.
_FIRST, _SHARE = 4, 16


@dataclass(frozen=True, slots=True)
class Model:
    """A model on a device. The tensors of a layer are whole while its module is called."""

    reference: Reference
    weights: Student | Teacher


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
        kept_layers: So many of the student's last layers keep their activations for the backward
            pass. The others run again.
    """

    student: Model
    teacher: Model
    rest: ShardedModule
    processes: Processes
    mixed: bool
    tokens_at_once: int
    kept_layers: int = 0

    def loss(self, tokens: Tensor) -> Tensor:
        """The loss of `tokens` [count, length], summed over those that count, to be minimized."""
        loss: Tensor = self.rest(self._loss, tokens)
        return loss

    def _loss(self, tokens: Tensor) -> Tensor:
        with self._precision():
            hidden = self._leaving(tokens)
            ours, theirs = (
                self._entering_head(model, states[:, _first(tokens) :])
                for model, states in zip((self.student, self.teacher), hidden, strict=True)
            )
        loss: Tensor = Divergence.apply(*ours, *theirs, self._chunk_rows)  # type: ignore[no-untyped-call]
        return loss

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
        divergence, loss, teacher_loss = (sums / tokens[:, _first(tokens) + 1 :].numel()).tolist()
        return Score(divergence, loss), teacher_loss

    @torch.no_grad()
    def _sums(self, tokens: Tensor) -> Tensor:
        """The divergence, the student's loss and the teacher's, summed over `tokens`, in fp64."""
        first = _first(tokens)
        with self._precision():
            hidden = self._leaving(tokens)
        ours, theirs = (
            self._entering_head(model, states[:, first:-1])
            for model, states in zip((self.student, self.teacher), hidden, strict=True)
        )
        targets = tokens[:, first + 1 :].flatten().to(hidden[0].device)
        sums = torch.zeros(3, dtype=torch.float64, device=targets.device)
        for rows, *logits in _logits(*ours, *theirs, self._chunk_rows):
            student, teacher = (torch.log_softmax(x, -1) for x in logits)
            losses = (nll_loss(x, targets[rows], reduction="sum") for x in (student, teacher))
            sums += torch.stack((_divergence(student, teacher), *losses)).double()
        return sums.cpu()

    def _leaving(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [count, length, hidden] after the last layer of student and teacher."""
        student, teacher = (
            embed(model.reference, model.weights.tensor, tokens)
            for model in (self.student, self.teacher)
        )
        layers = len(self.student.reference.layout.layers)
        for index in range(layers):
            theirs, ours = (model.weights.layers[index] for model in (self.teacher, self.student))
            with torch.no_grad():
                teacher = theirs(self._layer, self.teacher, index, teacher)
            again = () if index >= layers - self.kept_layers else (_activation_checkpoint,)
            student = ours(*again, self._layer, self.student, index, student)
        return student, teacher

    def _layer(self, model: Model, index: int, hidden: Tensor) -> Tensor:
        reference = model.reference
        weights = read_layer(reference.layout, model.weights.tensor, index)
        if not self.mixed:
            weights = {name: weight.float() for name, weight in weights.items()}
        return layer_forward(reference, reference.layout.layers[index], weights, hidden)

    def _entering_head(self, model: Model, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The states [tokens, hidden] that the unembedding gets, and the unembedding."""
        tied = model.reference.layout.tie_word_embeddings
        unembedding = model.weights.tensor(
            "model.embed_tokens.weight" if tied else "lm_head.weight"
        )
        if not self.mixed:
            unembedding = unembedding.float()
        norm = model.weights.tensor("model.norm.weight").float()
        states = last_norm(model.reference, norm, hidden).flatten(0, -2)
        return states.to(unembedding.dtype), unembedding

    @property
    def _chunk_rows(self) -> int:
        """Tokens whose logits exist at once."""
        rows = max(1, PIECE // self.student.reference.layout.vocab_size)
        return rows - rows % _TILE if rows > _TILE else rows

    def _precision(self) -> AbstractContextManager[object]:
        # Without the cache, bf16 copies of all weights are not held until the context ends.
        kind = self.student.reference.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=self.mixed, cache_enabled=False)


def _first(tokens: Tensor) -> int:
    """The first token of sequences [count, length] whose prediction counts."""
    return min(_FIRST, tokens.shape[1] // _SHARE)


def _activation_checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that keeps nothing for the backward pass, where it is called again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class Divergence(torch.autograd.Function):
    """The divergence of the predictions, summed over tokens; no gradient of the unembeddings."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        unembedding: Tensor,
        teacher: Tensor,
        teacher_unembedding: Tensor,
        chunk_rows: int,
    ) -> Tensor:
        """The sum, and its gradient, which takes no second pass over the vocabulary."""
        gradient = torch.empty_like(student)
        total = torch.zeros((), device=student.device)
        for rows, ours, theirs in _logits(
            student, unembedding, teacher, teacher_unembedding, chunk_rows
        ):
            chunk, difference = _with_gradient(ours, theirs, unembedding.dtype)
            total += chunk
            torch.mm(difference, unembedding, out=gradient[rows])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the student's states."""
        (gradient,) = ctx.saved_tensors
        return scale.to(gradient.dtype) * gradient, None, None, None, None


def _logits(
    student: Tensor,
    unembedding: Tensor,
    teacher: Tensor,
    teacher_unembedding: Tensor,
    chunk_rows: int,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The rows of each chunk of tokens, and their logits [rows, vocab] in fp32.

    States [tokens, hidden] are in the dtype of the unembeddings [vocab, hidden].
    """
    for first in range(0, len(student), chunk_rows):
        rows = slice(first, first + chunk_rows)
        ours = _unembedded(student[rows], unembedding)
        yield rows, ours, _unembedded(teacher[rows], teacher_unembedding)


def _unembedded(states: Tensor, unembedding: Tensor) -> Tensor:
    """Logits in fp32: rounded ones would hide small divergences."""
    if states.is_cuda and states.dtype == torch.bfloat16:
        return torch.mm(states, unembedding.T, out_dtype=torch.float32)
    return linear(states.float(), unembedding.float())


def _with_gradient(student: Tensor, teacher: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The divergence of logits [tokens, vocab], summed, and its gradient by the student's."""
    if student.is_cuda:
        # Triton, which a CPU does not need.
        from vllm_gac.kernels.divergence import divergence

        nats, gradient = divergence(student, teacher, dtype)
        return nats.sum(), gradient
    ours, theirs = (torch.log_softmax(x, -1) for x in (student, teacher))
    return _divergence(ours, theirs), ours.exp().sub_(theirs.exp()).to(dtype)


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of log-probabilities [tokens, vocab], summed."""
    return kl_div(student, teacher, reduction="sum", log_target=True)

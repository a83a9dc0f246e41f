"""The distance between two models, and its gradient, for every layout that there can be."""

import pytest
import torch
from hypothesis import assume, given, settings
from torch.nn.functional import cross_entropy, kl_div

from tests.alignment.random_models import TOKENS, RandomModel, models
from tests.support.dense_models import random_weights
from vllm_gac.compression.reference_model import Reference, logits, reference_of
from vllm_gac.healing import distillation
from vllm_gac.healing.distillation import Distillation, Model
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.student import Student, Teacher, may_change
from vllm_gac.layout.dims import ModelLayout, layout_of


def pair(
    model: RandomModel, rank: int | None = None, at_once: int = 4096
) -> tuple[Distillation, Student]:
    """`model` beside a dense teacher of its family, and its weights."""
    kept = {key: value for key, value in model.raw.items() if key not in ("gac", "architectures")}
    dense = layout_of(kept)
    weights = random_weights(dense.tensors().items(), seed=1)
    alone = Processes(torch.device("cpu"))
    student = Student(model.layout, model.weights.__getitem__, alone, rank, 0.01, may_change)
    return (
        Distillation(
            Model(_reference(model, model.layout), student),
            Model(_reference(model, dense), Teacher(dense, weights.__getitem__, alone)),
            student.rest,
            alone,
            mixed=False,
            tokens_at_once=at_once,
        ),
        student,
    )


def _reference(model: RandomModel, layout: ModelLayout) -> Reference:
    return reference_of(layout, model.hf_config, torch.float32)


def _logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        return logits(model.reference, model.weights.tensor, TOKENS)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("piece", "at_once"), [(distillation.PIECE, 4096), (3 * 32, 1)])
@given(model=models())
@settings(max_examples=5)
def test_loss_and_score_are_those_of_the_logits_of_any_model(
    first: int, piece: int, at_once: int, model: RandomModel
) -> None:
    """Whatever fits in memory at once."""
    both, _ = pair(model, at_once=at_once)
    ours, theirs = (_logits(each)[:, first:] for each in (both.student, both.teacher))
    predicted = [torch.log_softmax(logits, -1) for logits in (ours, theirs)]
    divergence = kl_div(*predicted, reduction="sum", log_target=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "_SHARE", TOKENS.shape[1] // first if first else 16)
        patch.setattr(distillation, "PIECE", piece)
        torch.testing.assert_close(both.loss(TOKENS).detach(), divergence, rtol=1e-4, atol=1e-4)
        score, teacher_loss = both.score(TOKENS)
    each = (x[:, :-1] for x in predicted)
    expected_divergence = kl_div(*each, reduction="sum", log_target=True)
    targets = TOKENS[:, first + 1 :].flatten()
    assert score.divergence == pytest.approx(expected_divergence.item() / len(targets), rel=1e-4)
    for actual, expected in ((score.loss, ours), (teacher_loss, theirs)):
        loss = cross_entropy(expected[:, :-1].flatten(0, 1), targets)
        assert actual == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("rank", [None, 3])
@given(model=models())
@settings(max_examples=10)
def test_the_gradient_is_that_of_the_logits(rank: int | None, model: RandomModel) -> None:
    assume(model.layout.experts is None)  # refused: one that no token goes to has none
    both, student = pair(model, rank)
    read = student.tensor
    ours = logits(both.student.reference, lambda name: read(name).float(), TOKENS)
    predicted = (torch.log_softmax(x, -1) for x in (ours, _logits(both.teacher)))
    kl_div(*predicted, reduction="sum", log_target=True).backward()
    expected = student.gradients()
    both.loss(TOKENS).backward()
    gradients = student.gradients()
    assert gradients.keys() == student.parameters().keys()
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
    fixed = {n for n in model.layout.tensors() if not may_change(n)}
    assert not any(read(name).requires_grad for name in fixed)


def test_products_in_bf16_change_the_gradient_a_little() -> None:
    torch.manual_seed(0)
    states, unembedding = (torch.randn(shape).bfloat16() for shape in ((300, 64), (500, 64)))
    teacher = (states + torch.randn_like(states) / 9).detach()
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        head = unembedding.to(dtype)
        ours = states.to(dtype).requires_grad_()
        distillation.Divergence.apply(ours, head, teacher.to(dtype), head, 128).backward()
        gradients.append(ours.grad.float())
    assert (gradients[0] - gradients[1]).norm() < 0.01 * gradients[0].norm()

"""Adam's steps are those of torch."""

import torch

from vllm_gac.healing.adam import Adam

SHAPES = {"matrix": (7, 5), "vector": (11,), "none": (0, 5)}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_steps_are_those_of_torch() -> None:
    ours, theirs = tensors(0), tensors(0)
    optimizer = Adam(ours)
    expected = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(5):
        rate = 0.1 / (1 + step)
        optimizer.step(tensors(step + 1), rate)
        for tensor, gradient in zip(theirs.values(), tensors(step + 1).values(), strict=True):
            tensor.grad = gradient
        expected.param_groups[0]["lr"] = rate
        expected.step()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_reset_moments_have_no_effect() -> None:
    ours, fresh = tensors(0), tensors(0)
    optimizer = Adam(ours)
    optimizer.step(tensors(1), 0.0)
    optimizer.forget()
    optimizer.step(tensors(2), 0.1)
    Adam(fresh).step(tensors(2), 0.1)
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in ours.items())

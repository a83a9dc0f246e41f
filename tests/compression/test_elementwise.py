"""What is computed in one pass has the result and the gradient of torch's own operations."""

import torch
from torch.nn.functional import silu

from vllm_gac.compression.elementwise import rotated, silu_mul
from vllm_gac.layout.rope import rotate


def test_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    angles = torch.rand(5, 1, 4)
    cos, sin = angles.cos(), angles.sin()
    for shape, count, ours, theirs in (
        ((2, 5, 7), 2, silu_mul, lambda gate, up: silu(gate) * up),
        ((2, 5, 3, 8), 1, lambda x: rotated(x, cos, sin), lambda x: rotate(x, cos, sin)),
    ):
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(count)]
        results = ours(*inputs), theirs(*inputs)
        assert torch.equal(*results)
        entering = torch.randn_like(results[0])
        ours_by_input, expected = (torch.autograd.grad(r, inputs, entering) for r in results)
        torch.testing.assert_close(ours_by_input, expected)

"""Tensors that are needed at the same time, such as those of a layer.

Where several processes heal together, each has a shard of every tensor, and FSDP2 gathers the
tensors while the module is called (processes.py). That is all that it is a module for: what is
computed with its tensors is a function that it is called with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


class ShardedModule(torch.nn.Module):
    """Some tensors of a model, by their names."""

    def add(self, name: str, tensor: Tensor, trained: bool) -> None:
        """Add a tensor; it gets gradients if it is `trained`."""
        self.register_parameter(_key(name), torch.nn.Parameter(tensor, requires_grad=trained))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return _key(name) in self._parameters

    def tensor(self, name: str) -> Tensor:
        """A tensor: the full one while the module is called, else this process's shard."""
        tensor = self._parameters[_key(name)]
        assert tensor is not None
        return tensor

    def trained(self) -> list[str]:
        """The names of the tensors that are trained."""
        return [
            key.replace("/", ".")
            for key, tensor in self._parameters.items()
            if tensor is not None and tensor.requires_grad
        ]

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function while all tensors are gathered."""
        return function(*arguments)


def local_shard(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, outside of the autograd graph."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _key(name: str) -> str:
    return name.replace(".", "/")  # modules allow no dots

"""The dense model that a student learns from: its tensors as they are stored."""

from collections.abc import Callable

import torch

from vllm_gac.healing.processes import Processes
from vllm_gac.healing.sharded_module import ShardedModule
from vllm_gac.layout.dims import ModelLayout


class Teacher:
    """A model that is not trained.

    Attributes:
        layers: The tensors of each layer.
    """

    def __init__(
        self, layout: ModelLayout, read: Callable[[str], torch.Tensor], processes: Processes
    ) -> None:
        """Read the tensors of a model."""
        self.layers = [ShardedModule() for _ in layout.layers]
        self._module_of: dict[str, ShardedModule] = {}
        for index, module in enumerate(self.layers):
            for name, _ in layout.layer_tensors(index):
                module.add(name, read(name).to(processes.device), trained=False)
                self._module_of[name] = module
            processes.shard(module)
        self._rest = {
            name: read(name).to(processes.device)
            for name in layout.tensors()
            if name not in self._module_of
        }

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the model; one of a layer is whole while its module is called."""
        return self._rest[name] if name in self._rest else self._module_of[name].tensor(name)

"""The model that is healed: its trained numbers in fp32, and the weights that follow from them.

What the optimizer sees is fp32. What the forward pass sees, and what is written in the end, is the
same rounded to the dtype in which the model is stored, so that what is measured is what is served.
The gradient passes through the rounding unchanged.

Either every weight is trained, or adapters are (LoRA: Hu et al., ICLR 2022): a matrix W becomes
W + 2 B A, where B A has a low rank, and B begins with zeros. The sum is the weight that is stored,
so nothing is left to merge. The two factors of a low-rank linear stay two factors in both cases,
and each has an adapter of its own. peft is not used: it wraps the modules of a model, and the
reference model is a function of its tensors.

Embeddings and unembeddings stay as they are, because compression leaves them alone; and so do RoPE
tables. Of a model that is quantized, only attention is trained that compression has unpacked.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vllm_gac.checkpoint.layer_shards import read_layer
from vllm_gac.healing.balance import training_scales
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.sharded_module import ShardedModule, local_shard
from vllm_gac.layout.dims import ModelLayout

Tensor = torch.Tensor
_ADAPTER_SCALE = 2.0
_SEED = 0


class Student:
    """A model that is trained.

    A parameter is what is trained: a tensor of the model by its name, at the scale of balance.py,
    or its adapters by NAME.adapter_a and NAME.adapter_b. All of them are fp32.

    Attributes:
        layout: The model's layout.
        layers: The tensors of each layer.
        rest: What is trained beside them.
    """

    def __init__(
        self,
        layout: ModelLayout,
        read: Callable[[str], Tensor],
        processes: Processes,
        adapter_rank: int | None,
        unit: float,
        trained: Callable[[str], bool],
    ) -> None:
        """Read the tensors of a model.

        Args:
            layout: Its layout.
            read: Reads a tensor by its full name.
            processes: Those that heal together.
            adapter_rank: The rank of the adapters; None trains whole weights.
            unit: The `rate_unit` of the dense model.
            trained: Whether a tensor is trained, of those that `may_change`, by its full name.
        """
        self.layout, self._processes = layout, processes
        self.layers = [ShardedModule() for _ in layout.layers]
        self.rest = ShardedModule()
        self._fixed: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._module_of: dict[str, ShardedModule] = {}
        self._is_trained = trained
        self._adapter_rank, self._generator = adapter_rank, torch.Generator().manual_seed(_SEED)
        for index, module in enumerate(self.layers):
            tensors = {name: read(name) for name, _ in layout.layer_tensors(index)}
            scales = training_scales(layout, index, tensors.__getitem__, unit)
            self._scales |= {n: s.to(processes.device) for n, s in scales.items() if trained(n)}
            dtypes = {
                self._add(module, name, tensor)
                for name, tensor in tensors.items()
                if may_change(name)
            }
            # Whole weights are sent as they are stored, but adapters in fp32.
            processes.shard(module, *(dtypes if adapter_rank is None and len(dtypes) == 1 else ()))
        for name in layout.tensors():
            if not may_change(name):
                self._fixed[name] = read(name).to(processes.device)
            elif name not in self._module_of:
                self._add(self.rest, name, read(name))
        self._trained_in = {
            name: module for module in (*self.layers, self.rest) for name in module.trained()
        }

    def _add(self, module: ShardedModule, name: str, stored: Tensor) -> torch.dtype:
        """Add a tensor to a module; returns its dtype."""
        device = self._processes.device
        self._module_of[name], self._dtypes[name] = module, stored.dtype
        if not self._is_trained(name):
            module.add(name, stored.to(device), trained=False)
        elif self._adapter_rank is None or stored.ndim == 1:
            scaled = self._scales.get(name, 1.0) * stored.to(device, torch.float32, copy=True)
            module.add(name, scaled, trained=True)
        else:
            module.add(name, stored.to(device), trained=False)
            pair = _adapters(stored, self._adapter_rank, self._generator)
            for kind, adapter in zip("ab", pair, strict=True):
                module.add(f"{name}.adapter_{kind}", adapter.to(device), trained=True)
        return stored.dtype

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model as it is stored, in the autograd graph if it is trained.

        Those of a module are gathered while it is called.
        """
        if name in self._fixed:
            return self._fixed[name]
        module, scale = self._module_of[name], self._scales.get(name)
        if not module.has(f"{name}.adapter_b"):
            if scale is None:
                return module.tensor(name).to(self._dtypes[name])
            stored: Tensor = _Stored.apply(module.tensor(name), scale, self._dtypes[name])  # type: ignore[no-untyped-call]
            return stored
        weight = module.tensor(name)
        with torch.autocast(weight.device.type, enabled=False):
            update = module.tensor(f"{name}.adapter_b") @ module.tensor(f"{name}.adapter_a")
            update = update if scale is None else update / scale
        return (weight.float() + _ADAPTER_SCALE * update).to(weight.dtype)

    def stored_layer(self, index: int) -> dict[str, Tensor]:
        """The tensors of a layer as they are stored, by their names within it, on the CPU.

        All processes call this together.
        """
        with torch.no_grad():
            layer: dict[str, Tensor] = self.layers[index](
                read_layer, self.layout, self._on_the_cpu, index
            )
        return layer

    def stored_rest(self) -> dict[str, Tensor]:
        """The tensors beside the layers, likewise, by their full names."""
        names = [name for name in self.layout.tensors() if not name.startswith("model.layers.")]
        with torch.no_grad():
            rest: dict[str, Tensor] = self.rest(
                lambda: {name: self._on_the_cpu(name) for name in names}
            )
        return rest

    def _on_the_cpu(self, name: str) -> Tensor:
        return self.tensor(name).to("cpu", copy=True).contiguous()

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter."""
        return {name: parameter.shape for name, parameter in self._trained()}

    def parameters(self) -> dict[str, Tensor]:
        """This process's shard of each parameter, outside of the autograd graph."""
        return {name: local_shard(parameter) for name, parameter in self._trained()}

    def gradients(self) -> dict[str, Tensor]:
        """The shard of the gradient of each parameter. The next ones begin with zero."""
        gradients_by_name = {}
        for name, parameter in self._trained():
            assert parameter.grad is not None
            gradients_by_name[name], parameter.grad = local_shard(parameter.grad), None
        return gradients_by_name

    def copy(self) -> dict[str, Tensor]:
        """A copy of `parameters` in host memory."""
        return {name: p.to("cpu", copy=True) for name, p in self.parameters().items()}

    def restore(self, shards: Mapping[str, Tensor]) -> None:
        """Set this process's shard of all parameters."""
        for name, parameter in self.parameters().items():
            parameter.copy_(shards[name])

    def full_tensor(self, name: str, shard: Tensor) -> Tensor:
        """All of what is sharded as parameter `name` is, on the CPU.

        All processes call this together, each with its `shard`.
        """
        parameter = self._parameter(name)
        return self._processes.full_tensor(parameter, shard).view(parameter.shape)

    def local_shard(self, name: str, full: Tensor) -> Tensor:
        """This process's shard of what is sharded as parameter `name` is."""
        return self._processes.local_shard(self._parameter(name), full)

    def _parameter(self, name: str) -> Tensor:
        return self._trained_in[name].tensor(name)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._trained_in:
            yield name, self._parameter(name)


class _Stored(torch.autograd.Function):
    """A parameter as it is stored: its scale is undone and it is rounded in one pass over it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """`parameter` divided by `scale`, in `dtype`."""
        ctx.scale, ctx.dtype = scale, parameter.dtype
        return _divided(parameter, scale, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the parameter."""
        return _divided(gradient, ctx.scale, ctx.dtype), None, None


def _divided(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.div(x, scale, out=torch.empty_like(x, dtype=dtype))


class Teacher:
    """The dense model that a student learns from, as it is stored.

    Attributes:
        layers: The tensors of each layer.
    """

    def __init__(
        self, layout: ModelLayout, read: Callable[[str], Tensor], processes: Processes
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

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model; one of a layer is whole while its module is called."""
        return self._rest[name] if name in self._rest else self._module_of[name].tensor(name)


def may_change(name: str) -> bool:
    """Whether healing may change a tensor of the model."""
    layers = name.startswith("model.layers.") and not name.endswith(".rope_inv_freq")
    return layers or name == "model.norm.weight"


def largest_adapter_rank(layout: ModelLayout, trained: Callable[[str], bool]) -> int:
    """The highest rank that the adapter of any trained matrix can have."""
    shapes = [s for name, s in layout.tensors().items() if trained(name) and len(s) > 1]
    return max(min(shape[-2:]) for shape in shapes)


def _adapters(weight: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A [..., rank, in] with rows of length about 1, and B [..., out, rank] of zeros."""
    *heads, out_size, in_size = weight.shape
    rank = min(rank, out_size, in_size)
    a = torch.randn(*heads, rank, in_size, generator=generator) * in_size**-0.5
    return a, torch.zeros(*heads, out_size, rank)

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
tables.
"""

from collections.abc import Callable, Mapping

import torch

from vllm_gac.layout.dims import ModelLayout

Tensor = torch.Tensor
_ADAPTER_SCALE = 2.0
_SEED = 0


class Student:
    """A model that is trained.

    Attributes:
        layout: Its layout.
        parameters: The fp32 tensors to train: a tensor of the model by its name, or its adapters by
            NAME.adapter_a and NAME.adapter_b.
    """

    def __init__(
        self,
        layout: ModelLayout,
        read: Callable[[str], Tensor],
        device: torch.device,
        adapter_rank: int | None,
    ) -> None:
        """Read the tensors of a model; `adapter_rank` None trains all weights of its layers."""
        self.layout = layout
        self.parameters: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        generator = torch.Generator().manual_seed(_SEED)
        for name in layout.tensors():
            stored = read(name)
            self._dtypes[name] = stored.dtype
            if not is_trained(name):
                self._fixed[name] = stored.to(device)
            elif adapter_rank is None or stored.ndim == 1:
                self.parameters[name] = stored.to(device, torch.float32, copy=True)
            else:
                self._fixed[name] = stored.to(device)
                a, b = _adapters(stored, adapter_rank, generator)
                self.parameters[f"{name}.adapter_a"] = a.to(device)
                self.parameters[f"{name}.adapter_b"] = b.to(device)
        for parameter in self.parameters.values():
            parameter.requires_grad_()

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model as it is stored, in the autograd graph if it is trained."""
        if name in self.parameters:
            return self.parameters[name].to(self._dtypes[name])
        fixed = self._fixed[name]
        if (b := self.parameters.get(f"{name}.adapter_b")) is None:
            return fixed
        update = b @ self.parameters[f"{name}.adapter_a"]
        return (fixed.float() + _ADAPTER_SCALE * update).to(fixed.dtype)

    def copy(self) -> dict[str, Tensor]:
        """A copy of all parameters in host memory."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Set all parameters to `values`."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])


def is_trained(name: str) -> bool:
    """Whether a tensor of the model may change."""
    layers = name.startswith("model.layers.") and not name.endswith(".rope_inv_freq")
    return layers or name == "model.norm.weight"


def _adapters(weight: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A [..., rank, in] with rows of length about 1, and B [..., out, rank] of zeros."""
    *heads, out_size, in_size = weight.shape
    rank = min(rank, out_size, in_size)
    a = torch.randn(*heads, rank, in_size, generator=generator) * in_size**-0.5
    return a, torch.zeros(*heads, out_size, rank)

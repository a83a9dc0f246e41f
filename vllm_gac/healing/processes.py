"""The processes that heal a model together, one for each GPU, as torchrun starts them.

Each has a shard of every weight of the layers, of its gradient and of Adam's moments, and trains on
its shard of each step's sequences: torch's FSDP2, which is the third stage of ZeRO (Rajbhandari et
al., SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023). Embeddings, which are not trained, are
replicated. Only rank 0 writes files and logs.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from vllm_gac.errors import GacError, HealingError
from vllm_gac.healing.sharded_module import ShardedModule

Tensor = torch.Tensor
_PLACE = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NUMBERS = (*_PLACE, "MASTER_PORT")
# The first process writes to disk while the others wait.
_MAX_WAIT = timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a healing, and which of them this one is.

    Attributes:
        device: The device of this process.
        count: How many there are.
        rank: The number of this one, from 0.
        mesh: All of them, if there are several.
    """

    device: torch.device
    count: int = 1
    rank: int = 0
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If one is refused within the block, all end; the first of those that are says why."""
        refusal = None
        try:
            yield
        except GacError as e:
            refusal = e
        refused = self.minimum(self.rank if refusal else self.count)
        if refusal is not None and refused == self.rank:
            raise refusal
        if refused < self.count:
            raise SystemExit(1)

    def broadcast(self, number: int) -> int:
        """What `number` is on rank 0."""
        return int(self._all_reduce(number if self.is_first else 0, dist.ReduceOp.SUM))

    def minimum(self, number: float) -> float:
        """The least `number` of any process."""
        return self._all_reduce(number, dist.ReduceOp.MIN)

    def summed(self, numbers: Tensor) -> Tensor:
        """The sum of the fp64 `numbers` of all processes."""
        if self.mesh is None:
            return numbers
        sums = numbers.to(self.device)
        dist.all_reduce(sums)
        return sums.to(numbers.device)

    def local_rows(self, sequences: Tensor) -> Tensor:
        """The shard of `sequences` [count, length] that this process trains on."""
        each = len(sequences) // self.count
        return sequences[self.rank * each : (self.rank + 1) * each]

    def shard(self, module: ShardedModule, gathered: torch.dtype | None = None) -> None:
        """Shard the tensors of a module, which are gathered in the dtype `gathered` if given."""
        if self.mesh is None:
            return
        precision = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False)
        fully_shard(module, mesh=self.mesh, reshard_after_forward=True, mp_policy=precision)

    def shard_rest(
        self,
        rest: ShardedModule,
        student: Sequence[ShardedModule],
        teacher: Sequence[ShardedModule],
    ) -> None:
        """Shard what is beside the layers, and prefetch each layer while others compute."""
        if self.mesh is None:
            return
        rest.add_module("layers", torch.nn.ModuleList([*student, *teacher]))
        self.shard(rest)
        for index, ours in enumerate(student):
            _prefetch(teacher[index], forward=[ours])
            # Backward, nothing comes after layer 0: it names itself, or the teacher's would come.
            _prefetch(ours, forward=teacher[index + 1 :][:1], backward=[student[max(index - 1, 0)]])
        rest(lambda: None)  # FSDP2 prepares itself when it is first called

    def full_tensor(self, tensor: Tensor, shard: Tensor) -> Tensor:
        """All of what each process has a `shard` of, sharded like `tensor`; on the CPU.

        All processes call this together.
        """
        if isinstance(tensor, DTensor):
            local = shard.to(self.device).view(tensor.to_local().shape)
            shard = DTensor.from_local(
                local, self.mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
            ).full_tensor()
        return shard.cpu()

    def local_shard(self, tensor: Tensor, full: Tensor) -> Tensor:
        """This process's shard of a `full` tensor in host memory, sharded like `tensor`."""
        if not isinstance(tensor, DTensor):
            return full
        each = -(-len(full) // self.count)
        return full[self.rank * each : (self.rank + 1) * each].clone()

    def _all_reduce(self, number: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.mesh is None:
            return number
        tensor = torch.tensor(float(number), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return float(tensor)


def _prefetch(
    module: ShardedModule, forward: Sequence[ShardedModule], backward: Sequence[ShardedModule] = ()
) -> None:
    assert isinstance(module, FSDPModule)
    module.set_modules_to_forward_prefetch([p for p in forward if isinstance(p, FSDPModule)])
    if backward:
        module.set_modules_to_backward_prefetch([p for p in backward if isinstance(p, FSDPModule)])


@contextmanager
def distributed_context(device: str) -> Iterator[Processes]:
    """This process among those that torchrun has started; alone if it has not.

    Raises HealingError if they have too few GPUs, or if torchrun's variables are not its own.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1":
        yield Processes(torch.device(device))
        return
    if missing := [name for name in (*_NUMBERS, "MASTER_ADDR") if name not in os.environ]:
        raise HealingError(
            f"WORLD_SIZE is {count}, but {', '.join(missing)} is not set; start it with torchrun, "
            "or unset WORLD_SIZE"
        )
    for name in ("WORLD_SIZE", *_NUMBERS):
        if not (value := os.environ[name]).isdecimal():
            raise HealingError(f"{name} is {value!r}: expected a number, as torchrun sets it")
    rank, local, here = (int(os.environ[name]) for name in _PLACE)
    local_device = torch.device(device)
    if local_device.type == "cuda":
        local_device = _gpu_of(local_device, local, here)
        torch.cuda.set_device(local_device)
    log = logging.getLogger("vllm_gac")
    level = log.level
    if rank:
        log.setLevel(logging.ERROR)
    backend, bound = ("nccl", local_device) if local_device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, timeout=_MAX_WAIT, device_id=bound)
    try:
        mesh = init_device_mesh(local_device.type, (int(count),))
        yield Processes(local_device, int(count), rank, mesh)
        dist.barrier()  # what the first one has written is there when any of them returns
    finally:
        log.setLevel(level)
        dist.destroy_process_group()


def _gpu_of(device: torch.device, local: int, here: int) -> torch.device:
    if str(device) != "cuda":
        raise HealingError(
            f"--device {device} with several processes: each computes on a GPU of its own; give "
            "--device cuda, and choose GPUs by CUDA_VISIBLE_DEVICES"
        )
    if here > (gpus := torch.cuda.device_count()):
        raise HealingError(
            f"{here} processes on this machine, which has {gpus} GPUs; give torchrun "
            f"--nproc-per-node {gpus}"
        )
    return torch.device("cuda", local)

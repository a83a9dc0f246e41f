"""What a healing chooses by itself: whole weights or adapters, its steps, and what a GPU holds."""

import logging
from dataclasses import dataclass, replace

import torch

from vllm_gac.errors import HealingError
from vllm_gac.healing.memory import Memory, chosen_rank, kept_layers, memory, tokens_at_once
from vllm_gac.healing.processes import Processes
from vllm_gac.healing.schedule import Schedule, schedule
from vllm_gac.healing.student import largest_adapter_rank
from vllm_gac.steps.heal.inputs import HealInputs
from vllm_gac.steps.heal.request import HealRequest

logger = logging.getLogger(__name__)

DEFAULT_ADAPTER_RANK = 32


@dataclass(frozen=True, slots=True)
class Choices:
    """How a model is healed.

    Attributes:
        request: The request with `train`, "full" or "lora", `lora_rank` and `learning_rate`.
        steps: Its steps.
        tokens_at_once: Tokens that run forward and backward at once.
        kept_layers: How many layers keep their activations for the backward pass.
    """

    request: HealRequest
    steps: Schedule
    tokens_at_once: int
    kept_layers: int


def choices(
    request: HealRequest, inputs: HealInputs, processes: Processes, before: object = None
) -> Choices:
    """Choose what the request leaves open; `before` are the tokens at once of a run that goes on.

    Raises HealingError if it cannot be met with these inputs, or in the memory of this machine.
    """
    gpu = _gpu_memory(processes)
    fitting = tokens_at_once(inputs.student.layout, inputs.teacher.layout, gpu)
    at_once = max(before if type(before) is int else fitting, inputs.length)
    rank, kept = _adapter_rank(request, inputs, processes, at_once, gpu and gpu[0])
    steps = schedule(
        len(inputs.trained),
        inputs.length,
        request.tokens or inputs.trained.numel(),
        request.batch_tokens,
        request.learning_rate,
        processes.count,
        unit=inputs.unit,
        layers=len(inputs.teacher.layout.layers),
        adapters=rank is not None,
    )
    chosen = replace(
        request,
        train="full" if rank is None else "lora",
        lora_rank=rank,
        learning_rate=steps.learning_rate,
    )
    return Choices(chosen, steps, at_once, kept)


def _gpu_memory(processes: Processes) -> tuple[int, int] | None:
    """The least bytes of a GPU that are free, and the least that it has; None on a CPU."""
    if processes.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(processes.device)
    return int(processes.minimum(free)), int(processes.minimum(total))


def _adapter_rank(
    request: HealRequest, inputs: HealInputs, processes: Processes, at_once: int, free: int | None
) -> tuple[int | None, int]:
    """The rank of the adapters that are trained, None if whole weights are; and layers kept."""
    student, teacher, requested = inputs.student, inputs.teacher, request.lora_rank
    max_rank = largest_adapter_rank(student.layout, inputs.is_trained)
    rank = min(DEFAULT_ADAPTER_RANK, max_rank) if requested is None else requested
    stored = student.unpacked_dtype.bytes, teacher.unpacked_dtype.bytes

    def needed(of: int | None) -> Memory:
        return memory(
            student.layout,
            teacher.layout,
            stored,
            at_once,
            of,
            processes.count,
            inputs.is_trained,
        )

    chosen = chosen_rank(request.train, rank, needed(None), needed(rank), free)
    kept = kept_layers(student.layout, needed(chosen), at_once, free)
    logger.info(
        "memory of the device: about %s; beside it, the activations of %d layers are kept",
        needed(chosen).described(),
        kept,
    )
    if chosen is None and requested is not None:
        logger.warning(
            "--lora-rank %d has no effect: whole weights are trained, because there is room for "
            "them; --train lora trains adapters",
            rank,
        )
    if chosen is not None and rank > max_rank:
        raise HealingError(
            f"--lora-rank {rank}: no matrix of {student.directory} has an adapter of more than "
            f"rank {max_rank}; give {max_rank} or less"
        )
    if chosen is not None and request.train == "auto":
        logger.info(
            "trains adapters of rank %d, because whole weights need %s",
            rank,
            needed(None).described(),
        )
    return chosen, kept

"""What kernels may use of a GPU, and what ours take: known without torch or asking the GPU."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HOPPER = (9, 0)
MULTIPROCESSORS = 132  # of an H100 or H200
# Bytes of shared memory that a multiprocessor has for its programs, and the most that one program
# may use. From NVIDIA's table "Compute Capabilities", for the GPUs that vLLM has kernels for.
_KIB = 1024
_SHARED_MEMORY = {
    (7, 0): (96 * _KIB, 96 * _KIB),
    (7, 5): (64 * _KIB, 64 * _KIB),
    (8, 0): (164 * _KIB, 163 * _KIB),
    (8, 6): (100 * _KIB, 99 * _KIB),
    (8, 7): (164 * _KIB, 163 * _KIB),
    (8, 9): (100 * _KIB, 99 * _KIB),
    (9, 0): (228 * _KIB, 227 * _KIB),
    (10, 0): (228 * _KIB, 227 * _KIB),
    (10, 3): (228 * _KIB, 227 * _KIB),
    (11, 0): (228 * _KIB, 227 * _KIB),
    (12, 0): (100 * _KIB, 99 * _KIB),
    (12, 1): (100 * _KIB, 99 * _KIB),
}
_OF_OTHERS = (100 * _KIB, 99 * _KIB)  # the least of all GPUs since Ampere


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of shared memory: of a multiprocessor for all its programs, and at most of one."""

    multiprocessor: int
    program: int


def shared_memory(capability: tuple[int, int]) -> SharedMemory:
    """The shared memory of GPUs of this compute capability."""
    return SharedMemory(*_SHARED_MEMORY.get(capability, _OF_OTHERS))


@functools.cache
def is_hopper(device: "torch.device") -> bool:
    """Whether the GPU is a Hopper: our kernels of linear layers were measured on one of these."""
    import torch

    is_nvidias = device.type == "cuda" and torch.version.hip is None
    return is_nvidias and torch.cuda.get_device_capability(device) == HOPPER


def converts_e4m3(capability: tuple[int, int]) -> bool:
    """Whether kernels may use fp8 numbers in e4m3: Triton compiles them for Ada and later GPUs."""
    return capability >= (8, 9)


# What a program of kernels/fp8_rows.py has registers for; and the multiple of both dims of a linear
# in FP8: it would pad others, and what we write has no room for it.
MAX_FP8_COLUMNS = 16384
FP8_MULTIPLE = 16


def takes_fp8_rows(in_size: int, out_size: int) -> bool:
    """Whether the input of a linear in FP8 may be quantized by kernels/fp8_rows.py."""
    whole = in_size % FP8_MULTIPLE == out_size % FP8_MULTIPLE == 0
    return whole and in_size <= MAX_FP8_COLUMNS


# Gate and up projections for which kernels/swiglu.py takes less time than cuBLAS and vLLM's SwiGLU
# on an H200 (docs/decisions.md). The true limit is between 2880 and 5760 features.
MAX_SWIGLU_TOKENS = 32
_MIN_SWIGLU_FEATURES = 4096


def takes_swiglu(tokens: int, features: int, width: int) -> bool:
    """Whether gate and up [features, width] of so many tokens are computed by kernels/swiglu.py."""
    return 0 < tokens <= MAX_SWIGLU_TOKENS and features >= _MIN_SWIGLU_FEATURES and width % 8 == 0

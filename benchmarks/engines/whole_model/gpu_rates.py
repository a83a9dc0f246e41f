"""The rates of the machine, from which ideal times are computed.

python -m benchmarks.engines.whole_model.gpu_rates OUT.json
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import vllm

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.profiling.timing import copy_bandwidth, microseconds, warm_up

_GEMM = 8192  # rows and columns
_FP8_SINCE = (8, 9)  # compute capability


def main() -> None:
    """Write the rates. Importing vLLM here reads its files into memory before any engine does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    out = parser.parse_args().out
    rates = _gpu_rates() if torch.cuda.is_available() else _cpu_rates()
    facts: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__}
    write_json(out, facts | rates)


def _gpu_rates() -> dict[str, float]:
    warm_up()
    x = torch.randn(_GEMM, _GEMM, device="cuda").bfloat16()
    flops = 2 * _GEMM**3 / (microseconds(lambda: x @ x) * 1e-6)
    rates = {"bytes_per_second": copy_bandwidth() * 1e12, "flops_per_second": flops}
    if torch.cuda.get_device_capability() >= _FP8_SINCE:
        rates["fp8_flops_per_second"] = _fp8_rate(x)
    return rates


def _fp8_rate(x: torch.Tensor) -> float:
    """FLOP/s of a GEMM of numbers in FP8 with one scale a tensor."""
    scale = torch.ones((), device="cuda")
    left, right = x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn).t()

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * _GEMM**3 / (microseconds(multiply) * 1e-6)


def _cpu_rates() -> dict[str, float]:
    """Rates that say little, but are enough to try everything else on a CPU."""
    x = torch.randn(1024, 1024)
    y = torch.empty_like(x)
    return {
        "bytes_per_second": 2 * x.nbytes / _seconds(lambda: y.copy_(x)),
        "flops_per_second": 2 * 1024**3 / _seconds(lambda: x @ x),
    }


def _seconds(call: object) -> float:
    assert callable(call)
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

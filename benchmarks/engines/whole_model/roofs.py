"""The rates of the machine, from which ideal times are computed.

python -m benchmarks.engines.whole_model.roofs OUT.json
"""

import argparse
import time
from pathlib import Path

import torch
import vllm

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.profiling.timing import copy_bandwidth, microseconds, warm_up


def main() -> None:
    """Write the rates. Importing vLLM here reads its files into memory before any engine does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    out = parser.parse_args().out
    rates = _gpu_rates() if torch.cuda.is_available() else _cpu_rates()
    facts = {"vllm": vllm.__version__, "torch": torch.__version__}
    write_json(out, facts | rates)


def _gpu_rates() -> dict[str, float]:
    warm_up()
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    flops = 2 * 8192**3 / (microseconds(lambda: x @ x) * 1e-6)
    return {"bytes_per_second": copy_bandwidth() * 1e12, "flops_per_second": flops}


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

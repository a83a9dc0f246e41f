"""Losses of the held-out windows by vLLM, in a process of its own, which keeps vLLM's memory.

python -m benchmarks.quality.ladder.served MODEL TEXT OUT.json [--quantization Q]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.quality.ladder.text import WINDOW, read_tensor
from vllm_gac.errors import GacError

_SHOWN = 600  # characters of the end of what a failed engine printed


def served_losses(
    model: Path, text: Path, out: Path, quantization: str | None, kv_cache_dtype: str
) -> list[float]:
    """The mean cross entropy of each held-out window but its first token, in nats.

    The process writes them to `out`, which is removed. Raises GacError if vLLM cannot run `model`
    in this way.
    """
    command = [sys.executable, "-m", __name__, f"{model}", f"{text}", f"{out}"]
    command += ["--kv-cache-dtype", kv_cache_dtype]
    if quantization is not None:
        command += ["--quantization", quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GacError(f"{' '.join(command)}: {done.stderr[-_SHOWN:]}")
    losses: list[float] = json.loads(out.read_text())
    out.unlink()
    return losses


def main() -> int:
    """Write the losses of the windows."""
    from vllm_gac.serving.plugin import register
    from vllm_gac.steps.evaluate import checked
    from vllm_gac.steps.evaluate_engine import engine_losses

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    register()  # where the package is a folder on the path, it has no entry points
    windows = read_tensor(options.text, "heldout.safetensors", "windows").long()
    losses = engine_losses(
        options.model,
        checked(options.model),
        [windows],
        WINDOW,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        eager=True,
    )
    options.out.write_text(json.dumps([round(loss / (WINDOW - 1), 6) for loss in losses]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

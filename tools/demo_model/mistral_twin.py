"""Write the demo model as a Mistral: the same weights, with a sliding window in the config.

`python -m tools.demo_model.mistral_twin OUT`. Mistral is Llama with a sliding window. Within the
first `sliding_window` tokens both compute the same.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_gac.checkpoint.atomic_files import appearing
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.demo import MODEL
from vllm_gac.errors import GacError

_COPIED = (
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
_LLAMA_ONLY = ("attention_bias", "mlp_bias")


def write_mistral_twin(out: Path, sliding_window: int = 256) -> None:
    """Write the twin into the directory `out`.

    A token attends to `sliding_window` tokens, including itself. Raises GacError if `out` exists or
    if the window is not positive.
    """
    if sliding_window < 1:
        raise GacError(f"--sliding-window: {sliding_window} tokens, expected at least 1")
    if out.exists():
        raise GacError(f"{out}: exists already; remove it or write elsewhere")
    config = read_json(MODEL / "config.json")
    config = {key: value for key, value in config.items() if key not in _LLAMA_ONLY}
    config["architectures"] = ["MistralForCausalLM"]
    config["model_type"] = "mistral"
    config["sliding_window"] = sliding_window
    with appearing(out) as partial:
        for name in _COPIED:
            shutil.copyfile(MODEL / name, partial / name)
        text = json.dumps(config, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo_model.mistral_twin", description=__doc__
    )
    parser.add_argument("out", type=Path, help="model directory to write")
    parser.add_argument("--sliding-window", type=int, default=256, help="in tokens (default: 256)")
    options = parser.parse_args(arguments)
    try:
        write_mistral_twin(options.out, options.sliding_window)
    except (GacError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

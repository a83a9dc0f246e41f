"""Many requests that share a long prefix and add a little: memory, and whether all are answered.

    python -m benchmarks.engines.shared_prefix OUT [--device cuda] [--commit ...]

Each model has Llama-3-8B's shape, random weights, vLLM's defaults and a process of its own. A
prompt of 100,000 tokens comes first, then 64 requests at once that repeat it and add 100 tokens;
then 80 requests over 120,000 tokens. Without a bound, a step would gather all those contexts.
Writes OUT/shared_prefix.json and .md; fails if a request is not answered. On a CPU, --small shows
that everything runs.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine
from benchmarks.common.page import arguments, provenance, save
from benchmarks.engines.shared_prefix.report import LONGEST, page
from benchmarks.engines.shared_prefix.wave import answer_wave, warm_up
from benchmarks.engines.whole_model.models import SHAPES, models

MODELS = ("heads-96-64", "latent-64")
# (tokens of the prefix, requests)
WAVES, SMALL_WAVES = ((100_000, 64), (120_000, 80)), ((100, 4), (200, 6))
SMALL_LONGEST = 512


def main() -> None:
    """Measure every model after the other, then write the page."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/shared_prefix"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a CPU")
    args = parser.parse_args()
    begun = time.monotonic()
    rows = [row for name in MODELS for row in _measure(name, args)]
    # Only now: CUDA in this process would take GPU memory beside the engines.
    command = f"python -m benchmarks.engines.shared_prefix OUT --device {args.device}"
    about = provenance(command, args.device, args.commit)
    result = about | {"seconds": round(time.monotonic() - begun), "rows": rows}
    text = page(result)
    save(args.out / "shared_prefix", result, text)
    print(text)


def _measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each wave of requests."""
    longest = SMALL_LONGEST if args.small else LONGEST
    shape = SHAPES["tiny" if args.small else "llama3-8b"]
    dense = shape.dense | {"max_position_embeddings": longest}
    # The names tell the sizes at Llama-3-8B's shape; other shapes scale them.
    names = [model.name for model in models(SHAPES["llama3-8b"].dense)]
    model = models(dense)[names.index(name)]
    model.write(args.work / name)
    # One process: all requests are there before the first step, which is the worst case.
    engine = Engine(name, args.work / f"{name}.log", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    try:
        engine.start(
            model=str(args.work / name),
            skip_tokenizer_init=True,
            load_format="gac",
            model_loader_extra_config=model.options,
            max_model_len=longest,
            seed=0,
            **shape.engine,
        )
        engine.ask(warm_up)
        rows = []
        for prefix, requests in SMALL_WAVES if args.small else WAVES:
            measured = engine.ask(answer_wave, prefix=prefix, requests=requests)
            rows.append({"model": name} | measured)
            print(rows[-1], flush=True)
        return rows
    finally:
        engine.close()


if __name__ == "__main__":
    main()

"""Output tokens a second of a model in FP8 or W4A16, and how many tokens its cache has room for.

Needs a GPU that does nothing else. Engines run one after the other, in CUDA graphs as a server's.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine
from benchmarks.common.engine_questions import batch_seconds, facts
from benchmarks.common.json_lines import append_line
from benchmarks.common.page import source
from benchmarks.real_models.engine import SECONDS, Serving
from benchmarks.real_models.rows import DENSE, INT4, OWN_ATTENTION

_SEQUENCES = (1, 8, 64, 256, 512)
_TOKENS = {"length": 2048, "output": 128}  # of each prompt and of its answer


def measure_speed(models: Sequence[tuple[str, Path]], out: Path, commit: str | None) -> None:
    """Append a line to `out`/speed.jsonl for each model: the name of its row, and its directory."""
    for name, directory in models:
        begun = time.monotonic()
        precision = "fp8 cache" if name.startswith(INT4) else "fp8"
        line: dict[str, Any] = {"row": name, "precision": precision}
        how = Serving(name not in (DENSE, OWN_ATTENTION, INT4), precision, name == OWN_ATTENTION)
        try:
            line |= _measured(directory, how, out)
        except Exception as e:
            line |= {"error": f"{type(e).__name__}: {e}"[:1000]}
        line["seconds"] = round(time.monotonic() - begun, 1)
        append_line(out / "speed.jsonl", line | source(commit))
        print(line, flush=True)


def _measured(directory: Path, how: Serving, out: Path) -> dict[str, Any]:
    log = out / "logs" / f"speed-{directory.name}.log"
    with closing(Engine("speed", log)) as engine:
        engine.start(
            model=f"{directory}",
            max_model_len=sum(_TOKENS.values()),
            max_num_seqs=max(_SEQUENCES),
            gpu_memory_utilization=0.9,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,  # requests then record when their tokens came
            seed=0,
            **how.options(),
        )
        engine.wait(SECONDS)
        about: dict[str, Any] = engine.ask(facts, seconds=SECONDS)
        engine.ask(batch_seconds, seconds=SECONDS, prompts=1, seed=-1, **_TOKENS)
        about["batches"] = []
        for count in _SEQUENCES:
            batch = engine.ask(batch_seconds, seconds=SECONDS, prompts=count, seed=count, **_TOKENS)
            rate = count * _TOKENS["output"] / batch["seconds"]
            about["batches"].append({"sequences": count, **batch, "tokens_per_second": rate})
    return about

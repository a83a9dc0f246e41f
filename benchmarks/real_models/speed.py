"""Output tokens a second of a model as served, and how many tokens its cache has room for.

Needs a GPU that does nothing else. Engines run one after the other, in CUDA graphs as a server's.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine
from benchmarks.common.engine_questions import batch_seconds, facts
from benchmarks.common.json_lines import append_line
from benchmarks.common.page import source
from benchmarks.real_models.engine import Serving
from benchmarks.real_models.rows import DENSE, OWN_ATTENTION

SEQUENCES = (1, 64, 256, 512)
_PROMPT, _OUTPUT = 2048, 128
_START_SECONDS, _SECONDS = 300, 180


def measure_speed(
    models: Sequence[tuple[str, Path]],
    out: Path,
    *,
    sequences: Sequence[int] = SEQUENCES,
    prompt: int = _PROMPT,
    output: int = _OUTPUT,
    precisions: Sequence[str] = ("fp8",),
    memory: float = 0.9,
    commit: str | None = None,
) -> None:
    """Append a line for each model and precision to `out`/speed.jsonl.

    Args:
        models: Names of rows, and the directories of their models.
        out: The directory.
        sequences: How many at once.
        prompt: Tokens of each prompt.
        output: Tokens of each answer.
        precisions: Of engine.PRECISIONS.
        memory: vLLM's --gpu-memory-utilization.
        commit: Of the sources, where they came without .git.
    """
    for name, directory in models:
        for precision in precisions:
            begun = time.monotonic()
            line: dict[str, Any] = {"row": name, "precision": precision}
            try:
                how = Serving(
                    compressed=name not in (DENSE, OWN_ATTENTION),
                    precision=precision,
                    own_attention=name == OWN_ATTENTION,
                )
                line |= _measured(directory, how, out, sequences, prompt, output, memory)
            except Exception as e:
                line |= {"error": f"{type(e).__name__}: {e}"[:1000]}
            line["seconds"] = round(time.monotonic() - begun, 1)
            append_line(out / "speed.jsonl", line | source(commit))
            print(line, flush=True)


def _measured(
    directory: Path,
    how: Serving,
    out: Path,
    sequences: Sequence[int],
    prompt: int,
    output: int,
    memory: float,
) -> dict[str, Any]:
    engine = Engine("speed", out / "logs" / f"speed-{directory.name}.log")
    try:
        engine.start(
            model=f"{directory}",
            max_model_len=prompt + output,
            max_num_seqs=max(sequences),
            gpu_memory_utilization=memory,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            disable_log_stats=False,  # requests then record when their tokens came
            seed=0,
            **how.options(),
        )
        engine.wait(_START_SECONDS)
        about: dict[str, Any] = engine.ask(facts, seconds=_SECONDS)
        size = {"length": prompt, "output": output}
        engine.ask(batch_seconds, seconds=_SECONDS, prompts=1, seed=-1, **size)
        about["batches"] = [
            {
                "sequences": count,
                **engine.ask(batch_seconds, seconds=_SECONDS, prompts=count, seed=count, **size),
            }
            for count in sequences
        ]
    finally:
        engine.close()
    for batch in about["batches"]:
        batch["tokens_per_second"] = batch["sequences"] * output / batch["seconds"]
    return about

"""Runs vLLM on several ranks in processes of their own: its answers and its cache size."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPTS = [[(37 * i + j * j * (i + 3)) % 4000 + 5 for j in range(101 - 23 * i)] for i in range(3)]
MAX_TOKENS = 8
# One thread per rank, which the system places: vLLM would need a NUMA node for each rank.
CPU_RANKS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# In eager mode vLLM 0.32 for CPU skips the profiling run, in which a later pipeline stage allocates
# buffers for the hidden states that it receives. With tracing, but no compilation, it does not skip
# it.
_COMPILATION: tuple[dict[str, Any], dict[str, Any]] = (
    {"enforce_eager": True},
    {"compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}},
)
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Answer:
    """Greedy tokens for each prompt, and how many tokens fit in the cache (1 GiB per rank)."""

    tokens: list[list[int]]
    room: int


def answer(model: Path, **engine: Any) -> Answer:
    """The answer to `PROMPTS` of an fp32 engine with these arguments.

    In bf16 the order in which ranks add could change a greedy choice; in fp32 it does not.
    """
    ranks = engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)
    with tempfile.TemporaryDirectory() as directory:  # a path short enough for Ray's sockets
        written, log = Path(directory, "answer.json"), Path(directory, "log")
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(model), json.dumps(engine), str(written)],
                cwd=_HERE.parents[1],
                env=os.environ | CPU_RANKS | _ray_environment(ranks, directory),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(
                        process.pid, signal.SIGKILL
                    )  # processes that a failed engine left behind
        assert process.returncode == 0, log.read_text()[-6000:]
        return Answer(**json.loads(written.read_text()))


def _ray_environment(ranks: int, directory: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(_HERE / "ray_on_cpu"), os.environ.get("PYTHONPATH"))))
    return {
        "PYTHONPATH": path,
        "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": ranks}),
        "RAY_TMPDIR": directory,
        "RAY_worker_niceness": "0",  # of 15 by default: starved where something else runs
    }


def main(model: str, engine: dict[str, Any], written: Path) -> None:
    """Run the engine and write its answer."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model,
        **{
            "dtype": "float32",
            **_COMPILATION["pipeline_parallel_size" in engine],
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,  # prompts are prefilled in chunks
            "disable_log_stats": True,
            **engine,
        },
    )
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    room = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    answered = Answer([list(output.outputs[0].token_ids) for output in outputs], room)
    written.write_text(json.dumps(asdict(answered)))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))

"""Runs vLLM in a process of its own, on one model with several alignment strategies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad, silu

PROMPTS = [[(37 * i + j * j * (i + 3)) % 4000 + 5 for j in range(101 - 23 * i)] for i in range(3)]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that this process sees the logits
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
}


def run(model: Path, directory: Path, strategies: list[str]) -> dict[str, dict[str, Any]]:
    """By strategy: greedy tokens, logits of every step, and vLLM's head size and cache tokens."""
    arguments = [json.dumps(strategies), str(model), str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {strategy: torch.load(directory / f"{strategy}.pt") for strategy in strategies}


def main(strategies: list[str], model: str, directory: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.inputs import TokensPrompt
    from vllm.model_executor.layers.activation import SiluAndMul

    from vllm_gac.serving.model.llama import GacLlamaForCausalLM

    logits: list[torch.Tensor] = []
    compute = GacLlamaForCausalLM.compute_logits

    def observed(self: GacLlamaForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute(self, hidden).clone())
        return logits[-1]

    GacLlamaForCausalLM.compute_logits = observed
    SiluAndMul.forward_native = staticmethod(silu_and_mul_in_whole_vectors)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    for strategy in strategies:
        llm = LLM(
            model,
            load_format="gac",
            model_loader_extra_config={"align": strategy},
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            disable_log_stats=True,
        )
        logits.clear()
        sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        config = llm.llm_engine.vllm_config
        answered = {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "logits": torch.cat(logits),
            "head_size": config.model_config.get_head_size(),
            "kv_cache_tokens": config.cache_config.kv_cache_size_tokens,
        }
        torch.save(answered, directory / f"{strategy}.pt")
        del llm
        cleanup_dist_env_and_memory()


def silu_and_mul_in_whole_vectors(x: torch.Tensor) -> torch.Tensor:
    """SiluAndMul that uses the same instructions for every channel.

    Torch uses other instructions for the columns at the end of a row that do not fill a vector.
    Their results differ by one unit in the last place, and padding changes which columns these are.
    """
    width = x.shape[-1] // 2
    gate, up = x[..., :width], x[..., width:]
    return silu(pad(gate, (0, -width % 64)))[..., :width] * up


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

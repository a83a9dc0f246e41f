"""Each family, dense and compressed, is served as transformers and the reference compute it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.agreement import PROMPTS, step_errors
from tests.serving.engines import OPTIONS, answers, in_engine_process
from tests.support.dense_models import YARN_ROPE, config, weights, write, write_text
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.layout.families import FAMILIES
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress import compress

# In fp32 only the order of sums differs.
ERROR = 2e-3
CACHE_BYTES = 1 << 30
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 48},
    "qwen2": {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2 with a window": {
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 48,
        "max_window_layers": 0,
    },
    "qwen3": {"head_dim": 64},  # not hidden_size / num_attention_heads
    "llama with yarn": {"head_dim": 32, "rope_parameters": YARN_ROPE},
    "qwen3 with yarn": {"head_dim": 64, "rope_parameters": YARN_ROPE},
}


def served(directories: list[str]) -> list[Any]:
    """The answers of each model, its blocks, and the tokens of a block."""
    from vllm import LLM

    found = []
    for directory in directories:
        llm = LLM(directory, **OPTIONS)
        cache = llm.llm_engine.vllm_config.cache_config
        found.append([answers(llm), cache.num_gpu_blocks, cache.block_size])
        del llm
    return found


def errors_of(expected: torch.Tensor, prompt: list[int], tokens: list[int], top: Any) -> float:
    """The largest error of a step, whose token is to be among the best."""
    rows = expected[0, len(prompt) - 1 : -1].log_softmax(-1)
    by_id = [{int(token): logprob for token, logprob in step.items()} for step in top]
    return max(max(gap, error) for gap, error in step_errors(rows, tokens, by_id))


@pytest.mark.slow
def test_logprobs_are_those_of_transformers_and_of_the_reference(tmp_path: Path) -> None:
    import transformers

    text, dense, small = write_text(tmp_path / "text.txt"), {}, {}
    for name, changes in FAMILY.items():
        raw = config(
            model_type=name.split()[0],
            architectures=[FAMILIES[name.split()[0]].architecture],
            hidden_size=128,
            vocab_size=4096,
            max_position_embeddings=512,
            **changes,
        )
        dense[name] = raw, write(tmp_path / name / "dense", raw)
        small[name] = tmp_path / name / "compressed"
        asked = PlanRequest(param_ratio=0.9, kv_ratio=0.6)
        compress(
            dense[name][1],
            small[name],
            asked,
            calibration=[text],
            max_tokens=1024,
            sequence_length=128,
            progress=False,
        )
    directories = [str(path) for _, path in dense.values()] + [str(p) for p in small.values()]
    found = dict(zip(directories, in_engine_process(served, directories), strict=True))

    for raw, path in dense.values():
        architecture = FAMILIES[raw["model_type"]].architecture
        theirs = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**raw))
        theirs.load_state_dict(weights(raw), strict=not raw["tie_word_embeddings"])
        for prompt, (tokens, top) in zip(PROMPTS, found[str(path)][0], strict=True):
            with torch.inference_mode():
                expected = theirs.eval()(torch.tensor([prompt + tokens])).logits
            assert errors_of(expected, prompt, tokens, top) < ERROR, path
    for path in small.values():
        checkpoint = open_checkpoint(path)
        answered, blocks, block_size = found[str(path)]
        for prompt, (tokens, top) in zip(PROMPTS, answered, strict=True):
            with checkpoint.reader() as read:
                expected = logits(reference(checkpoint), read, torch.tensor([prompt + tokens]))
            assert errors_of(expected, prompt, tokens, top) < ERROR, path
        assert blocks == CACHE_BYTES // (block_size * 4 * checkpoint.layout.kv_elements), path

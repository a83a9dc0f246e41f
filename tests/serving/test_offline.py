"""Offline engines in each kind of process, started by a script that imports only vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines import OPTIONS, returned
from tests.serving.models import layer, write_model
from tests.serving.quantized import write_quantized

# The guard is needed because spawned processes import the script again.
SCRIPT = """
import json, multiprocessing, sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    model, options, forked = json.loads(sys.argv[1])
    if forked:  # as on a GPU; vLLM for CPUs always spawns
        from vllm.v1.engine import utils
        utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    llm = LLM(model, **options)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(start, start + 40))} for start in (5, 900)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    started = [type(child).__name__ for child in multiprocessing.active_children()]
    print("RETURNED " + json.dumps([started, [list(o.outputs[0].token_ids) for o in outputs]]))
"""
ENGINES = {
    "this process": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "forked": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"},
    "spawned": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"},
}
# Rows of whole tiles, which all of vLLM's int8 kernels support, also the one for AMX.
LAYERS = [
    layer(("rotary", 4, 64), (4, 64), 512),
    layer(("latent", 2, 64), (2, 64), 256, {"mlp.down_proj": 64, "self_attn.q_proj": 96}),
]


@pytest.mark.slow
def test_engines_in_each_kind_of_process_give_the_same_answers(tmp_path: Path) -> None:
    write_model(tmp_path / "plain", LAYERS)
    write_quantized(tmp_path / "plain", tmp_path / "packed", tmp_path / "rounded", "W8A8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # int8 kernels support bf16 on every CPU, but fp32 only on CPUs without AMX.
    options = OPTIONS | {"dtype": "bfloat16"}
    answered = {
        name: _run(script, tmp_path / "packed", options, env) for name, env in ENGINES.items()
    }
    started = {name: processes for name, (processes, _) in answered.items()}
    assert started == {
        "this process": [],
        "forked": ["ForkProcess"],
        "spawned": ["SpawnProcess"],
    }
    tokens = answered["this process"][1]
    assert [len(answer) for answer in tokens] == [8, 8]
    assert {name: actual for name, (_, actual) in answered.items()} == dict.fromkeys(
        ENGINES, tokens
    )


def _run(script: Path, model: Path, options: dict[str, Any], env: dict[str, str]) -> Any:
    arguments = json.dumps([str(model), options, "fork" in env.values()])
    return returned([str(script), arguments], env)

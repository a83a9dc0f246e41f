"""The demo model with per-layer head sizes: what a GPU serves against what a CPU serves.

    python -m benchmarks.engines.agreement plans  DIR      # plans for the demo model
    python -m benchmarks.engines.agreement record OUT.json MODEL...     # on each machine
    python -m benchmarks.engines.agreement compare CPU.json GPU.json    # prints the table

`record` serves each compressed model as by default (on a GPU in CUDA graphs), scores held-out text
token by token and completes prompts greedily.
"""

import json
import math
import platform
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from benchmarks.common.provenance import compiler
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.dims import KeyLayout, ValueLayout
from vllm_gac.planning.plan_file import uniform_plan

# Keys (form, heads, size) and values (heads, size) by layer: sizes that stock kernels take, pairs
# of sizes that they refuse, and forms that they do not know.
ATTENTION = {
    "equal": [(("rotary", 4, size), (4, size)) for size in (64, 96, 128, 96)],
    "unequal": [
        (("rotary", 4, key), (4, value))
        for key, value in ((96, 64), (64, 96), (112, 80), (128, 64))
    ],
    "forms": [
        (("latent", 4, 64), (2, 128)),
        (("rotary", 4, 96), (2, 128)),
        (("latent", 2, 128), (2, 128)),
        (("rotary", 2, 128), (2, 96)),
    ],
}
TEXT_TOKENS, WINDOW = 3600, 900
PROMPTS = ("def __init__(self", "import os\n", "class Node:\n", "    for i in range(", "try:\n")


def plans(directory: Path) -> None:
    """Write plans of the demo model with each of ATTENTION."""
    model = open_checkpoint(demo.MODEL)
    base = uniform_plan(model, param_ratio=0.9, kv_ratio=1.0, methods=["prune"])
    for name, shapes in ATTENTION.items():
        layers = [
            replace(
                dense,
                key=_key(dense.key, *key),
                value=ValueLayout(*value),
                intermediate_size=section.intermediate_size,
            )
            for dense, section, (key, value) in zip(
                model.layout.layers, base.layers, shapes, strict=True
            )
        ]
        layout = replace(model.layout, layers=tuple(layers))
        plan = base.model_dump(mode="json") | {
            "methods": ["heads", "prune"],
            "layers": [layer.section() for layer in layers],
        }
        plan["parameters"]["used"] = layout.parameters
        plan["kv_elements"]["used"] = layout.kv_elements
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(plan, indent=2))


def _key(dense: KeyLayout, form: Literal["rotary", "latent"], heads: int, size: int) -> KeyLayout:
    own = (heads, size) == (dense.heads, dense.size)
    return KeyLayout(form, heads, size, rope_table=form == "rotary" and not own)


def record(out: Path, models: list[Path]) -> None:
    """Serve `models` one after the other and write what they answered, with the machine's facts."""
    import torch
    import vllm
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    text = tokenizer.encode(demo.HELD_OUT.read_text()).ids[:TEXT_TOKENS]
    windows = [text[i : i + WINDOW] for i in range(0, len(text), WINDOW)]
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results: dict[str, Any] = {
        "device": gpu or platform.processor() or platform.machine(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
        "models": {model.name: _serve(model, windows, prompts) for model in models},
    }
    out.write_text(json.dumps(results))


def _serve(model: Path, windows: list[list[int]], prompts: list[list[int]]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    memory = {"gpu_memory_utilization": 0.3}
    llm = LLM(str(model), load_format="gac", max_model_len=1024, seed=0, **memory)
    score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": w} for w in windows], score)
    logprobs = [
        step[token].logprob
        for output in scored
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    greedy = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, logprobs=5)
    completed = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy)
    config = llm.llm_engine.vllm_config
    attention = llm.collective_rpc(_attention_backends)[0]
    return {
        "layers": [layer.section() for layer in open_checkpoint(model).layout.layers],
        "attention": attention,
        "compilation": str(config.compilation_config.mode),
        "cudagraphs": str(config.compilation_config.cudagraph_mode),
        "text_logprobs": logprobs,
        "completions": [
            {
                "tokens": list(o.outputs[0].token_ids),
                "top": [[[t, p.logprob] for t, p in s.items()] for s in o.outputs[0].logprobs],
                "text": o.outputs[0].text,
            }
            for o in completed
        ],
    }


def _attention_backends(worker: Any) -> list[str]:
    """Runs in the worker: the attention backend of each layer, in order."""
    model = worker.get_model()
    return [layer.self_attn.attn.attn_backend.get_name() for layer in model.model.layers]


def compare(first: Path, second: Path) -> None:
    """Print how far two recordings of the same models are from each other."""
    a, b = (json.loads(path.read_text()) for path in (first, second))
    for side in (a, b):
        print(f"{side['device']}: vLLM {side['vllm']}, {compiler(side)}")
    for name in a["models"]:
        _compare_model(name, a["models"][name], b["models"][name])


def _compare_model(name: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    print(f"\n{name}:", *(_shape(layer) for layer in a["layers"]), sep="  ")
    for side in (a, b):
        print(f"  attention {side['attention']}, {side['compilation']}, {side['cudagraphs']}")
    differences = [abs(p - q) for p, q in zip(a["text_logprobs"], b["text_logprobs"], strict=True)]
    perplexities = [math.exp(-sum(side["text_logprobs"]) / len(differences)) for side in (a, b)]
    print(
        f"  {len(differences)} held-out tokens: perplexity {perplexities[0]:.4f} and "
        f"{perplexities[1]:.4f}, |difference of logprobs| mean "
        f"{sum(differences) / len(differences):.4f}, largest {max(differences):.3f}"
    )
    same = total = 0
    gaps = []
    for left, right in zip(a["completions"], b["completions"], strict=True):
        steps = list(zip(left["tokens"], right["tokens"], strict=True))
        until = next((i for i, (x, y) in enumerate(steps) if x != y), len(steps))
        same, total = same + until, total + len(steps)
        if until < len(steps):  # what the first of the two thought of the other's token
            top = dict(left["top"][until])
            gaps.append(max(top.values()) - top.get(right["tokens"][until], -math.inf))
    print(
        f"  greedy: {same} of {total} tokens before the first difference of each prompt; "
        f"logprob gaps there {[round(gap, 3) for gap in gaps]}"
    )


def _shape(layer: dict[str, Any]) -> str:
    key, value = layer["key"], layer["value"]
    return f"{key['form']} {key['heads']}x{key['size']}/{value['heads']}x{value['size']}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["plans", directory]:
            plans(Path(directory))
        case ["record", out, *models] if models:
            record(Path(out), [Path(model) for model in models])
        case ["compare", first, second]:
            compare(Path(first), Path(second))
        case _:
            sys.exit(__doc__)

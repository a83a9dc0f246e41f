"""Does a GPU answer what a CPU answers? The demo model with head sizes that differ by layer.

    python -m benchmarks.engines.agreement plans  DIR      # plans for the demo model
    python -m benchmarks.engines.agreement record OUT.json MODEL...     # on each machine
    python -m benchmarks.engines.agreement compare CPU.json GPU.json    # prints the table

`record` serves each compressed model with vLLM's defaults (on a GPU with CUDA graphs), scores
held-out text token by token and completes prompts greedily.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import demo_text
from benchmarks.common.completions import agreement
from benchmarks.common.engine_process import Engine
from benchmarks.common.engine_questions import complete, facts, score
from benchmarks.common.page import documented
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.dims import KeyLayout, ValueLayout
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest

# Keys (form, heads, size) and values (heads, size) of each layer: sizes that vLLM's kernels take,
# pairs of sizes that they refuse, and forms that they do not know.
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
TOP = 5  # logprobs of each step


def plans(directory: Path) -> None:
    """Write plans of the demo model with each of ATTENTION."""
    model = open_checkpoint(demo.MODEL)
    base = prior_plan(model, PlanRequest(param_ratio=0.9, methods=("prune",)))
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
    """Serve `models` one after the other; write their facts and what they answered as JSON."""
    out.write_text(json.dumps({model.name: _serve(model, out.parent) for model in models}))


def _serve(model: Path, logs: Path) -> dict[str, Any]:
    engine = Engine(model.name, logs / f"{model.name}.log")
    try:
        memory = {"gpu_memory_utilization": 0.3}
        engine.start(model=str(model), load_format="gac", max_model_len=1024, seed=0, **memory)
        return {
            "layers": [layer.section() for layer in open_checkpoint(model).layout.layers],
            **engine.ask(facts),
            "text_logprobs": engine.ask(score, windows=demo_text.windows()),
            "completions": engine.ask(
                complete,
                prompts=demo_text.prompts(),
                output=demo_text.COMPLETION_TOKENS,
                top=TOP,
            ),
        }
    finally:
        engine.close()


def compare(first: Path, second: Path) -> None:
    """Print how far two recordings of the same models are from each other."""
    a, b = (json.loads(path.read_text()) for path in (first, second))
    for name in a:
        _compare_model(name, a[name], b[name])


def _compare_model(name: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    print(f"\n{name}:", *(_shape(layer) for layer in a["layers"]), sep="  ")
    for side in (a, b):
        versions = f"vLLM {side['vllm']}, torch {side['torch']}, triton {side['triton']}"
        print(f"  {side['machine']}: {versions}")
        print(f"  attention {side['attention']}, {side['compilation']}, {side['cudagraphs']}")
    differences = [abs(p - q) for p, q in zip(a["text_logprobs"], b["text_logprobs"], strict=True)]
    perplexities = [math.exp(-sum(side["text_logprobs"]) / len(differences)) for side in (a, b)]
    print(
        f"  {len(differences)} held-out tokens: perplexity {perplexities[0]:.4f} and "
        f"{perplexities[1]:.4f}, |difference of logprobs| mean "
        f"{sum(differences) / len(differences):.4f}, largest {max(differences):.3f}"
    )
    completions = agreement(a["completions"], b["completions"])
    print(
        f"  greedy: {completions.equal} of {completions.total} tokens before the first difference "
        f"of each prompt; logprob gaps there {[round(gap, 3) for gap in completions.gaps]}"
    )


def _shape(layer: dict[str, Any]) -> str:
    key, value = layer["key"], layer["value"]
    return f"{key['form']} {key['heads']}x{key['size']}/{value['heads']}x{value['size']}"


def main() -> None:
    """Run one of the verbs."""
    parser = documented(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    plans_parser = verbs.add_parser("plans", help="write plans for the demo model")
    plans_parser.add_argument("directory", type=Path)
    record_parser = verbs.add_parser("record", help="serve models and write what they answer")
    record_parser.add_argument("out", type=Path, metavar="OUT.json")
    record_parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    compare_parser = verbs.add_parser("compare", help="print how far two recordings differ")
    compare_parser.add_argument("first", type=Path, metavar="CPU.json")
    compare_parser.add_argument("second", type=Path, metavar="GPU.json")
    args = parser.parse_args()
    if args.verb == "plans":
        plans(args.directory)
    elif args.verb == "record":
        record(args.out, args.models)
    else:
        compare(args.first, args.second)


if __name__ == "__main__":
    main()

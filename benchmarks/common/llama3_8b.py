"""Models of Llama-3-8B's shape without weights, for load tests on one GPU.

    python -m benchmarks.common.llama3_8b build/llama3-8b

Writes three directories with a config.json and a tokenizer each: `dense`; `gac`, which follows the
plan of `vllm-gac plan --param-ratio 0.8 --kv-ratio 0.75` (or another `--kv-ratio`, and with `--fp8`
one for FP8); and `misaligned`, which follows the same plan but makes every planned dim slightly
larger than the aligned one. A server fills in random weights: vLLM's loader with
`--load-format dummy`, ours with `--model-loader-extra-config '{"weights": "dummy"}'`. The speed of
a server depends on dims, not on values.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_gac import demo
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.layout.key_forms import is_latent
from vllm_gac.layout.schema import HfConfig
from vllm_gac.planning.plan_file import Plan
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest

PARAM_RATIO, KV_RATIO = 0.8, 0.75
# How models in FP8 are served: 64 requests at a time, each with 1,250 tokens halfway through its
# answer.
SERVED_IN_FP8: dict[str, Any] = {
    "gpu": "h200",
    "quantization": "fp8_per_tensor",
    "kv_cache_dtype": "fp8",
    "decode_batch": 64,
    "decode_context": 1250,
}
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}


def main() -> None:
    """Write the directories, and print what the models hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for the three models")
    parser.add_argument("--kv-ratio", type=float, default=KV_RATIO, help="default: %(default)s")
    parser.add_argument("--fp8", action="store_true", help="plan for FP8 weights and an FP8 cache")
    parser.add_argument("--context", type=int, help="tokens of context (default: 8192)")
    options = parser.parse_args()
    out = options.out
    context = options.context or DENSE["max_position_embeddings"]
    dense = DENSE | {"max_position_embeddings": context}
    served = SERVED_IN_FP8 if options.fp8 else {}
    models = write_models(
        out, dense, PlanRequest(param_ratio=PARAM_RATIO, kv_ratio=options.kv_ratio, **served)
    )
    for name, layout in models.items():
        print(
            f"{out / name}: {layout.parameters:,} parameters, {2 * layout.kv_elements:,} KV bytes "
            "per token"
        )


def write_models(
    out: Path, dense: dict[str, Any] = DENSE, request: PlanRequest | None = None
) -> dict[str, ModelLayout]:
    """Write dense, gac and misaligned below `out`, and return the layout of each."""
    _write(out / "dense", dense)
    request = request or PlanRequest(param_ratio=PARAM_RATIO, kv_ratio=KV_RATIO)
    plan = prior_plan(without_weights(out / "dense", dense), request)
    configs = {
        "dense": dense,
        "gac": _planned(dense, plan, 0),
        "misaligned": _planned(dense, plan, 1),
    }
    for name, config in configs.items():
        _write(out / name, config)
    return {name: layout_of(config) for name, config in configs.items()}


def without_weights(directory: Path, config: dict[str, Any]) -> Checkpoint:
    """The model of the config.json in `directory`; a plan needs dims alone."""
    return Checkpoint(directory, config, HfConfig.model_validate(config), layout_of(config), {})


def compressed(dense: dict[str, Any], layers: list[dict[str, Any]]) -> dict[str, Any]:
    """The config of a compressed model.

    Args:
        dense: The config of the dense model.
        layers: The section of each layer in the `gac` object.
    """
    section = {
        "version": 1,
        "softmax_scale": dense["head_dim"] ** -0.5,
        "head_dim": dense["head_dim"],
        "layers": layers,
    }
    config = dense | {"architectures": ["GacLlamaForCausalLM"], "gac": section}
    return config | {"head_dim": layout_of(config).cache_head_dim}


def _planned(dense: dict[str, Any], plan: Plan, past: int) -> dict[str, Any]:
    """The config of `plan` with each planned dim larger by `past`.

    Rotary keys consist of pairs, so they grow by twice as much.
    """
    layers = [section.model_dump(mode="json") for section in plan.layers]
    for layer in layers:
        layer["key"]["size"] += past * (1 if is_latent(layer["key"]["form"]) else 2)
        layer["value"]["size"] += past
        layer["intermediate_size"] += past
    return compressed(dense, layers)


def _write(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # The demo model's tokenizer, with a word for every other token, so that answers are texts.
    tokenizer = json.loads((demo.MODEL / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = len(vocabulary)
    vocabulary.update({f"<{i}>": i for i in range(known, config["vocab_size"])})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = json.loads((demo.MODEL / "tokenizer_config.json").read_text())
    about["model_max_length"] = config["max_position_embeddings"]
    (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""The models that are timed, and their shapes."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.llama3_8b import DENSE, write_models
from benchmarks.engines.whole_model.grid.cells import PLANNED_FP8, models_by_name


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one length that arrive at once, each answered with `output` tokens."""

    prompts: int
    length: int
    output: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense model, MLP widths of compressed ones, and how they are timed.

    `width` is aligned even after halving; `before` is aligned, but its half is not. Each batch is
    timed `repeats` times.
    """

    dense: dict[str, Any]
    width: int
    before: int
    prefill: Batch
    decode: Batch
    repeats: int
    cache_bytes: int  # on each GPU
    engine: dict[str, Any] = field(default_factory=dict)


FP8 = {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"}


def in_fp8(shape: Shape) -> Shape:
    """The shape with FP8 weights and an FP8 cache, which holds as many tokens of a dense model."""
    return replace(shape, engine=shape.engine | FP8, cache_bytes=shape.cache_bytes // 2)


SHAPES = {
    "llama3-8b": Shape(
        DENSE,
        width=11520,
        before=11528,
        prefill=Batch(16, 2048, 1),
        decode=Batch(64, 512, 129),
        repeats=3,
        cache_bytes=6 << 30,
        engine={"max_model_len": 4096},
    ),
    "tiny": Shape(  # to try the script on a CPU
        DENSE
        | {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 4096,
            "max_position_embeddings": 1024,
        },
        width=416,
        before=432,  # a CPU does not take every half
        prefill=Batch(2, 64, 1),
        decode=Batch(3, 16, 9),
        repeats=2,
        cache_bytes=1 << 26,
        engine={"max_model_len": 512, "enforce_eager": True},
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One engine: a model in the models' directory, its ranks, stages, and options of our loader.

    Without options the model is dense, and vLLM's own loader fills it.
    """

    name: str
    model: str
    tp: int
    options: dict[str, Any] | None = None
    pp: int = 1


_DUMMY = {"weights": "dummy"}
RUNS = (
    Run("dense, TP 1", "dense", 1),
    Run("GAC, TP 1", "gac", 1, _DUMMY),
    Run("dense, TP 2", "dense", 2),
    Run("GAC, TP 2", "gac", 2, _DUMMY),
    Run("GAC aligned before sharding, TP 2", "before", 2, _DUMMY | {"align": "none"}),
    Run("the same, padded while loading, TP 2", "before", 2, _DUMMY),
)
FP8_RUNS = (
    Run("dense, TP 1", "dense", 1),
    Run("plan, TP 1", PLANNED_FP8, 1, _DUMMY),
    Run("dense, TP 2", "dense", 2),
    Run("plan, TP 2", PLANNED_FP8, 2, _DUMMY),
    Run("(96, 64) heads, TP 2", "heads-96-64", 2, _DUMMY),
    Run("latents of 64, TP 2", "latent-64", 2, _DUMMY),
    Run("low rank .8, TP 2", "low-rank-80", 2, _DUMMY),
    Run("dense, PP 2", "dense", 1, pp=2),
    Run("plan, PP 2", PLANNED_FP8, 1, _DUMMY, pp=2),
)
# Of each two, the first is compared with the second.
RATIOS = {
    "speed": (
        ("GAC, TP 1", "dense, TP 1"),
        ("GAC, TP 2", "dense, TP 2"),
        ("dense, TP 2", "dense, TP 1"),
        ("GAC, TP 2", "GAC, TP 1"),
        ("GAC, TP 2", "GAC aligned before sharding, TP 2"),
        ("the same, padded while loading, TP 2", "GAC aligned before sharding, TP 2"),
    ),
    "fp8": (
        *((run.name, f"dense, {run.name[-4:]}") for run in FP8_RUNS if run.model != "dense"),
        ("dense, TP 2", "dense, TP 1"),
        ("plan, TP 2", "plan, TP 1"),
        ("dense, PP 2", "dense, TP 1"),
        ("plan, PP 2", "plan, TP 1"),
    ),
}


def write_fp8(out: Path, shape: Shape) -> None:
    """Write the models of FP8_RUNS below `out`, without weights; a plan takes seconds."""
    made = models_by_name(shape.dense)
    for name in {run.model for run in FP8_RUNS}:
        made[name]().write(out / name)


def write(out: Path, shape: Shape) -> list[dict[str, Any]]:
    """Write dense, gac and before below `out`, without weights.

    The dims of gac follow a plan, except the width, which is the same in every layer.

    Returns:
        The layers of `before`.
    """
    write_models(out, shape.dense)
    config = json.loads((out / "gac" / "config.json").read_text())
    for name, width in (("gac", shape.width), ("before", shape.before)):
        for layer in config["gac"]["layers"]:
            layer["intermediate_size"] = width
        directory = out / name
        directory.mkdir(exist_ok=True)
        for file in (out / "dense").iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    layers: list[dict[str, Any]] = config["gac"]["layers"]
    return layers

"""The models, a dense one and compressed variants of its shape, and the batches to time."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common.llama3_8b import DENSE, SERVED_IN_FP8, compressed, without_weights
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.layout.key_forms import KeyForm, is_latent
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest

# Sections of the `gac` object.
Layers: TypeAlias = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one length that arrive at once, each answered with `output` tokens.

    The batch is timed `runs` times.
    """

    prompts: int
    length: int
    output: int
    runs: int = 3

    @property
    def name(self) -> str:
        return f"{self.prompts}x{self.length}->{self.output}"

    @property
    def is_prefill(self) -> bool:
        """Whether prefill alone is timed: each prompt is answered with one token."""
        return self.output == 1


BATCHES = (
    Batch(16, 2048, 1),
    Batch(1, 128, 256, runs=2),
    Batch(64, 128, 256, runs=2),
    Batch(128, 2048, 256, runs=1),
    Batch(256, 2048, 128, runs=1),
)
# By these it is chosen whose kernels serve a step.
SEQUENCES = tuple(Batch(count, 1024, 256, 1 + (count <= 64)) for count in (1, 8, 64, 256, 512))
# Of BATCHES, what is timed on two GPUs.
PREFILL, DECODE = BATCHES[0], replace(BATCHES[3], runs=2)
ONE_PROMPT = Batch(1, 4096, 1)  # takes as long as the host, if that is slower than the GPU
_NARROW = 11520  # the width of narrower MLPs
# Head sizes of PaLU's Llama-3-8B at a ratio of 0.8, by table 7 of "When Smaller Is Slower".
_PALU_SIZES = (114, 117, 121, 125)
_HALF_CACHE = PlanRequest(param_ratio=0.8, kv_ratio=0.5, gpu="h200")
_HALF_CACHE_FP8 = replace(_HALF_CACHE, **SERVED_IN_FP8)


@dataclass(frozen=True, slots=True)
class Model:
    """One model.

    Attributes:
        what: Its layers, in words.
        config: Its config.json.
        options: Those of --model-loader-extra-config; None if vLLM's own loader makes the weights.
        engine: More arguments of LLM(...).
    """

    what: str
    config: dict[str, Any]
    options: dict[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> ModelLayout:
        return layout_of(self.config)

    def write(self, directory: Path) -> None:
        """Write the model's directory: config.json alone, without weights."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")


@cache
def model(name: str) -> Model:
    """The model of this name; a plan takes seconds.

    Raises:
        KeyError: There is no such model.
    """
    count, heads = DENSE["num_hidden_layers"], DENSE["num_key_value_heads"]

    def of(what: str, layers: Layers, **options: Any) -> Model:
        return Model(what, compressed(DENSE, list(layers)), {"weights": "dummy", **options})

    def palu() -> Layers:
        sizes = (_PALU_SIZES[i % len(_PALU_SIZES)] for i in range(count))
        width = DENSE["intermediate_size"]
        return [_section("rotary", heads, size, heads, size, width) for size in sizes]

    if name == "dense":
        return Model("as it was", DENSE)
    if name == "dense-own-attention":
        what = "as it was, with our decode kernel"
        return Model(what, DENSE, engine={"attention_backend": "GAC"})
    if name == "dense-own-layers":
        what = "as it was, with our decode kernel and our layers"
        return Model(what, DENSE, {"weights": "dummy"}, {"attention_backend": "GAC"})
    if name == "heads-96-64":
        what = f"MLP width {_NARROW}, {heads} heads of (96, 64)"
        return of(what, [_section("rotary", heads, 96, heads, 64)] * count)
    if name == "latent-64":
        what = f"MLP width {_NARROW}, {heads} latents of 64, {heads // 2} value heads of 128"
        return of(what, [_section("latent", heads, 64, heads // 2, 128)] * count)
    if name == "palu-heads":
        return of("heads of 114 to 126, whole MLPs, served unpadded", palu(), align="none")
    if name == "palu-heads-repaired":
        return of("the same, padded while loading", palu())
    if name == "planned":
        what = "the planner's dims for 80 % of the parameters and half the cache"
        return of(what, _planned(_HALF_CACHE))
    if name == "planned-fp8":
        what = "the same, for 64 requests of 1,250 tokens in FP8 with an FP8 cache"
        return of(what, _planned(_HALF_CACHE_FP8))
    if name == "planned-fp8-tp2":
        what = "planned-fp8 for two GPUs"
        return of(what, _planned(replace(_HALF_CACHE_FP8, tensor_parallel_size=2)))
    raise KeyError(name)


def _planned(request: PlanRequest) -> Layers:
    with tempfile.TemporaryDirectory() as folder:
        # A plan names the config that it is for. Dims are all that it needs beside.
        (Path(folder) / "config.json").write_text(json.dumps(DENSE))
        plan = prior_plan(without_weights(Path(folder), DENSE), request)
    return [layer.model_dump(mode="json") for layer in plan.layers]


def _section(
    form: KeyForm,
    key_heads: int,
    key_size: int,
    value_heads: int,
    value_size: int,
    width: int = _NARROW,
) -> dict[str, Any]:
    key_size += key_size % 2  # RoPE rotates pairs
    return {
        "key": {"form": form, "heads": key_heads, "size": key_size},
        "value": {"heads": value_heads, "size": value_size},
        "intermediate_size": width,
        # Keys that lost pairs have rotation frequencies of their own.
        "rope_table": not is_latent(form),
    }

"""`merge_factors`: low-rank linears are multiplied out while loading, and served as plain ones."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config.load import LoadConfig

from tests.importers.low_rank_models import RANKS, TOOLS, low_rank
from tests.importers.tools import write
from tests.serving.engines import (
    CPU_RANKS,
    OPTIONS,
    answers,
    assert_same,
    each_in_engine_process,
)
from tests.serving.models import layer, layout_with, write_model
from tests.serving.stubs import ModelConfigStub, VllmConfigStub, stream
from tests.serving.test_align import aligned
from tests.support.dense_models import config
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.alignment.zero_padding import padded_tensor
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.gpu.profile import Types
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.tensor_parallel import repeated_heads, repeated_tensor
from vllm_gac.serving.config.served_layout import align_config, shard_config
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.loader import GacModelLoader
from vllm_gac.serving.loading.merged_factors import merged_tensors
from vllm_gac.serving.metrics import MERGE_FACTORS, _other_types, planned_types

PLAIN = ("rotary", 4, 64), (4, 64)
MLP = {"mlp.gate_proj": 104, "mlp.up_proj": 88, "mlp.down_proj": 96}
LAYERS = [
    layer(*PLAIN, 512, MLP | {"self_attn.q_proj": 96, "self_attn.o_proj": 120}),
    layer(("latent", 4, 32), (2, 48), 256, {"self_attn.k_proj": 24, "self_attn.v_proj": 40}),
    # Misaligned ranks, heads and width; and a q_proj of full rank beside two factors.
    layer(("rotary", 4, 58), (2, 35), 252, {"self_attn.k_proj": 61, "mlp.up_proj": 37}),
]
BIASES = {"attention_bias": True, "mlp_bias": True}
MERGE = {"merge_factors": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", LAYERS, **BIASES)
    return tmp_path / "model"


def streamed(stub: Any, **options: Any) -> dict[str, torch.Tensor]:
    """What the loader hands to a model that is served in fp32."""
    stub.dtype = torch.float32
    return dict(stream(stub, **options))


@pytest.mark.parametrize("strategy", ["none", "minimal", "measured"])
@pytest.mark.parametrize("tp", [1, 4])  # with 4, value heads are repeated
def test_the_loader_streams_products_that_are_padded_and_repeated(
    model: Path, strategy: Any, tp: int
) -> None:
    served = aligned(model, {"tp": tp}, align=strategy, **MERGE)
    shard_config(served)  # type: ignore[arg-type]
    on_disk, factors = open_checkpoint(model).layout, load_file(model / "model.safetensors")
    merged = on_disk.without_ranks()
    padded = padded_layout(merged, strategy, tp=tp)
    assert served.stored == on_disk
    repeated = repeated_heads(padded, tp)
    assert served.served == repeated
    for threads in (1, 8):  # loading again makes a new loader, which has only the config
        tensors = streamed(served.model_config, num_threads=threads, **MERGE)
        for name in merged.tensors():
            expected = padded_tensor(merged, padded, name, product(factors, name))
            expected = repeated_tensor(padded, repeated, name, expected)
            torch.testing.assert_close(tensors.pop(name).float(), expected)
        assert all(name.endswith(".rope_inv_freq") for name in tensors)  # of keys that are padded


def product(factors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Tensor `name` of the merged model, in fp32."""
    linear, _, kind = name.rpartition(".")
    tensor = factors[name if name in factors else f"{linear}.B.{kind}"].float()
    down = factors.get(f"{linear}.A.{kind}")
    return tensor if down is None else tensor @ down.float()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"trainer": object()}, "--weight-transfer-config"),
        ({"lora": object()}, "--enable-lora"),
    ],
)
def test_factors_that_have_to_stay_apart_are_refused(
    model: Path, change: dict[str, Any], reason: str
) -> None:
    hf_config = GacConfig.from_pretrained(model)
    if "quantization_config" in change:
        hf_config.quantization_config = change.pop("quantization_config")
    stub = VllmConfigStub(model, MERGE, hf_config=hf_config, **change)
    with pytest.raises(CheckpointError, match=f"merge_factors: .*{reason}"):
        align_config(stub)  # type: ignore[arg-type]
    assert stub.served == stub.stored


def test_a_model_without_low_rank_is_refused(tmp_path: Path) -> None:
    """A gac model before any worker starts; a dense one, which has no hook of ours, in it."""
    write_model(tmp_path / "gac", [layer(*PLAIN, 512)])
    with pytest.raises(CheckpointError, match="merge_factors"):
        aligned(tmp_path / "gac", **MERGE)
    extra = {"weights": "dummy", **MERGE}
    loader = GacModelLoader(LoadConfig(load_format="gac", model_loader_extra_config=extra))
    stub: Any = ModelConfigStub(tmp_path, config())
    stub.runner_type = "generate"
    with pytest.raises(CheckpointError, match="merge_factors"):
        loader.create_model(SimpleNamespace(), stub)  # type: ignore[arg-type]


def test_a_product_that_overflows_is_refused() -> None:
    def factors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.layers.0.mlp.up_proj.B.weight", torch.full((3, 2), 300.0)
        yield "model.layers.0.mlp.up_proj.A.weight", torch.full((2, 5), 300.0)

    with pytest.raises(CheckpointError, match=r"0\.mlp\.up_proj: .*float16"):
        list(merged_tensors(factors(), torch.float16, finite_check=True))
    for dtype, check in ((torch.float16, False), (torch.bfloat16, True)):
        ((name, weight),) = merged_tensors(factors(), dtype, check)
        assert (name, weight.shape) == ("model.layers.0.mlp.up_proj.weight", (3, 5))


@pytest.mark.parametrize("tool", ["asvd", "svd-llm"])
def test_models_of_other_tools_are_merged(tool: str, tmp_path: Path) -> None:
    raw, tensors = low_rank(TOOLS[tool], config(), RANKS)
    write(tmp_path / "model", raw, tensors, TOOLS[tool].rename)
    checkpoint = open_any_format(tmp_path / "model")[1]
    stub: Any = ModelConfigStub(tmp_path / "model", dict(checkpoint.raw_config))
    apart = streamed(stub)
    stub.hf_config = GacConfig.of(stub.hf_config)
    stub.hf_config.serve(checkpoint.layout.without_ranks())
    merged = streamed(stub)
    assert merged.keys() == checkpoint.layout.without_ranks().tensors().keys()
    for linear in RANKS:
        product = apart[f"{linear}.B.weight"].float() @ apart[f"{linear}.A.weight"].float()
        torch.testing.assert_close(merged[f"{linear}.weight"], product)


@pytest.mark.parametrize(
    ("planned", "types"),
    [
        *((asdict(types), types) for types in (Types(), Types("fp8", "fp8"))),
        *((malformed, None) for malformed in (None, "fp8", [], {"weights": ["fp8"]})),
        ({"weights": "fp8", "cache": "int2"}, None),
    ],
)
def test_the_types_of_a_plan_are_read_if_they_are_known(planned: Any, types: Types | None) -> None:
    assert planned_types({"planned_for": planned}) == types


def test_a_model_in_the_types_of_its_plan_gives_no_warning(model: Path) -> None:
    stub = VllmConfigStub(model)
    stub.model_config.hf_config.gac["source"] = {"planned_for": asdict(Types())}
    assert _other_types(stub.served, stub) is None  # type: ignore[arg-type]
    stub.cache_config.cache_dtype = "fp8"
    warning = str(_other_types(stub.served, stub))  # type: ignore[arg-type]
    assert "an FP8 cache" in warning
    assert MERGE_FACTORS not in warning


@pytest.mark.slow
def test_merged_factors_answer_as_the_factors_do(model: Path) -> None:
    """Before and after a reload, of dummies as many, and on two ranks."""
    directory, dummy_weights = str(model), MERGE | {"weights": "dummy"}
    apart, merged, dummy = each_in_engine_process(
        _served, [(directory, extra) for extra in ({}, MERGE, dummy_weights)]
    )
    (parallel,) = each_in_engine_process(_served, [(directory, MERGE, 2)], **CPU_RANKS)
    for actual in (merged["answers"], merged["reloaded"], parallel["answers"]):
        assert_same(actual, apart["answers"], 2e-4)
    padded = padded_layout(layout_with(LAYERS, **BIASES), "minimal")
    blocks, block_size = apart["room"]
    assert blocks == 2**30 // (block_size * 4 * padded.kv_elements)
    more = padded.without_ranks().parameters - padded.parameters
    for actual in (merged, dummy):
        assert actual["weights"] - apart["weights"] == more
        assert actual["room"] == apart["room"]
        assert actual["compiled as"] != apart["compiled as"]


def _served(directory: str, extra: dict[str, Any], tp: int = 1) -> dict[str, Any]:
    """What an fp32 engine answers, before and after a reload; and what it is made of."""
    from vllm import LLM

    llm = LLM(directory, model_loader_extra_config=extra, tensor_parallel_size=tp, **OPTIONS)
    engine = llm.llm_engine.vllm_config
    answered = {
        "answers": answers(llm),
        "weights": llm.collective_rpc(_weights)[0],
        "room": [engine.cache_config.num_gpu_blocks, engine.cache_config.block_size],
        "compiled as": engine.compute_hash(),
    }
    if extra == MERGE:
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        answered["reloaded"] = answers(llm)
    return answered


def _weights(worker: Any) -> int:
    """Numbers in the linears of a worker's layers. vLLM may keep the weights elsewhere."""
    from vllm.model_executor.layers.linear import LinearBase

    modules = worker.get_model().model.layers.modules()
    return sum(x.input_size * x.output_size for x in modules if isinstance(x, LinearBase))

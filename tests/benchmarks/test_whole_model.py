"""The whole-model benchmark: its models have the stated dims, and an ideal run realizes 1."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.engines.whole_model import ideal
from benchmarks.engines.whole_model.models import SHAPES, Batch, Model, models
from vllm_gac.layout.dims import LINEARS

pytest.importorskip("matplotlib", reason="needs the extra `dev`")

from benchmarks.engines.whole_model.report import markdown, results, write_report
from benchmarks.engines.whole_model.trace import alone, gaps

ROOFS = ideal.Roofs(4e12, 7e14)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_heterogeneous_plan_has_the_bytes_of_the_uniform_one(shape: str) -> None:
    every = {model.name: model.layout for model in models(SHAPES[shape].dense)}
    plan, twin = every["heterogeneous"], every["heads-96-64"]
    assert len({(x.key.size, x.value.size) for x in plan.layers}) >= 6
    assert len({(x.key.size, x.value.size) for x in twin.layers}) == 1
    assert (plan.parameters, plan.kv_elements) == (twin.parameters, twin.kv_elements)
    for layer, past in zip(plan.layers, every["misaligned"].layers, strict=True):
        assert layer.intermediate_size % 8 == 0
        assert past.intermediate_size == layer.intermediate_size + 1
        assert (past.key, past.value) == (layer.key, layer.value)


def test_models_are_those_of_the_table() -> None:
    every = {model.name: model for model in models(SHAPES["llama3-8b"].dense)}
    assert next(iter(every)) == "dense"
    assert round(every["dense"].layout.parameters / 1e9, 2) == 8.03
    latent = every["latent-64"].layout.layers[0]
    assert (latent.key.form, latent.key.heads, latent.key.size) == ("latent", 8, 64)
    assert (latent.value.heads, latent.value.size) == (4, 128)
    grouped = every["groups-192-128"].layout.layers[0]
    assert (grouped.key.heads, grouped.key.size, grouped.value.heads) == (4, 192, 4)
    assert not every["heads-128-128"].layout.layers[0].key.rope_table
    assert all(
        model.layout.layers[0].intermediate_size == 11520 for model in list(every.values())[1:4]
    )


@pytest.mark.parametrize("percent", [70, 80, 90])
def test_low_rank_models_keep_their_share_of_the_parameters(percent: int) -> None:
    every = {model.name: model.layout for model in models(SHAPES["llama3-8b"].dense)}
    dense, low_rank = every["dense"], every[f"low-rank-{percent}"]
    assert low_rank.parameters / dense.parameters == pytest.approx(percent / 100, abs=5e-3)
    assert low_rank.kv_elements == dense.kv_elements
    for layer in low_rank.layers:
        assert set(layer.ranks) == set(LINEARS)
        assert all(rank % 64 == 0 for rank in layer.ranks.values())


def test_ideal_counts_bytes_and_flops_of_the_dense_model() -> None:
    dense = models(SHAPES["llama3-8b"].dense)[0].layout
    batch = Batch(3, 100, 5)
    embeddings = 128256 * 4096
    weights, cached = 2 * (dense.parameters - embeddings), 2 * 32 * 8 * (128 + 128)
    steps = sum(weights + 3 * context * cached for context in (101, 102, 103, 104))
    assert ideal.decode_bytes(dense, batch) == steps
    norms = 65 * 4096
    linears = dense.parameters - 2 * embeddings - norms
    pairs = 100 * 101 // 2
    attention = 2 * 2 * 32 * 128 * 32 * pairs  # q k and p v, heads, head size, layers
    assert ideal.prefill_flops(dense, batch) == 3 * (200 * linears + attention + 2 * embeddings)
    flops, read = ideal.prefill_flops(dense, batch), ideal.decode_bytes(dense, batch)
    assert ideal.seconds(dense, batch, ROOFS) == pytest.approx(flops / 7e14 + read / 4e12)


def test_realized_is_the_promised_part_of_the_speedup() -> None:
    assert ideal.realized(1.3, 1.3) == pytest.approx(1)
    assert ideal.realized(0.9, 1.2) == pytest.approx(-0.5)
    assert ideal.realized(1.3, 1.0) is None


def ideal_run(model: Model, batches: tuple[Batch, ...]) -> dict[str, Any]:
    """The JSON of a model if everything took its ideal time."""
    bytes_of_a_block = 16 * 2 * model.layout.kv_elements
    return {
        "compiled_before": False,
        "startup_seconds": 20.0,
        "torch_compile_seconds": 5.0,
        "first_answer_seconds": 0.1,
        "machine": "GPU",
        "vllm": "0.32.0",
        "torch": "2",
        "triton": "3",
        "attention": ["FLASH_ATTN"] * 32,
        "kv_bytes_available": 10**11,
        "block_size": 16,
        "kv_blocks": 10**11 // bytes_of_a_block,
        "compiled_after_startup": [],
        "batches": {
            batch.name: [
                {
                    "seconds": ideal.seconds(model.layout, batch, ROOFS) * noise,
                    "decode_seconds": ideal.decode_bytes(model.layout, batch)
                    / ROOFS.bytes_per_second,
                }
                for noise in (1, 0.9, 1.2)
            ]
            for batch in batches
        },
    }


def write_ideal_runs(runs: Path, *names: str) -> None:
    shape = SHAPES["llama3-8b"]
    every = {model.name: model for model in models(shape.dense)}
    facts = {"shape": "llama3-8b", "commit": "abc", "engine": {}, "date": "2026-01-01"}
    rates = {"bytes_per_second": 4e12, "flops_per_second": 7e14}
    runs.mkdir(exist_ok=True)
    for name, content in (("run", facts), ("roofs", rates)):
        (runs / f"{name}.json").write_text(json.dumps(content))
    for name in names:
        batches = shape.batches if name != "latent-64" else shape.batches[:4]
        (runs / f"{name}.json").write_text(json.dumps(ideal_run(every[name], batches)))


def test_a_run_that_is_ideal_realizes_one(tmp_path: Path) -> None:
    write_ideal_runs(tmp_path, "dense", "heads-64-64", "latent-64")
    rows = {row["name"]: row for row in results(tmp_path)["models"]}
    assert set(rows) == {"dense", "heads-64-64", "latent-64"}
    for name in ("heads-64-64", "latent-64"):
        row = rows[name]
        gains = [*row["batches"].values(), *row["phases"].values()]
        assert [gain["realized"] for gain in gains] == pytest.approx([1] * len(gains), abs=0.002)
        assert list(row["phases"]) == [
            "prefill", "decode at 1", "decode at 64", "decode at 128", "KV room"
        ]  # fmt: skip
        assert row["kv_tokens"] == row["kv_tokens_of_its_bytes"]
    assert all(batch["of_roofs"] == 1 for batch in rows["dense"]["batches"].values())

    write_report([tmp_path], tmp_path / "out")
    page = (tmp_path / "out.md").read_text()
    assert "| heads-64-64 | 1.359 of 1.359 = 1.00 |" in page
    ElementTree.parse(tmp_path / "out.svg")
    assert len(json.loads((tmp_path / "out.json").read_text())["models"]) == 3


def test_models_on_two_gpus_are_compared_each_with_the_dense_one_on_it(
    tmp_path: Path,
) -> None:
    write_ideal_runs(tmp_path / "0", "dense", "heads-64-64")
    write_ideal_runs(tmp_path / "1", "dense", "latent-64")
    slower = json.loads((tmp_path / "1/dense.json").read_text())
    for runs in slower["batches"].values():
        for run in runs:
            run["seconds"] *= 2
    (tmp_path / "1/dense.json").write_text(json.dumps(slower))
    write_report([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    rows = json.loads((tmp_path / "out.json").read_text())["models"]
    assert [row["name"] for row in rows] == ["dense", "heads-64-64", "latent-64"]
    prefills = [row["phases"]["prefill"] for row in rows]
    assert prefills[1]["speedup"] == pytest.approx(prefills[1]["ideal"], abs=1e-3)
    assert prefills[2]["speedup"] == pytest.approx(2 * prefills[2]["ideal"], abs=1e-3)
    beside = "On a GPU beside it, against a dense model of its own: latent-64."
    assert beside in (tmp_path / "out.md").read_text()


def test_models_on_a_gpu_without_a_dense_one_are_compared_with_that_of_the_first(
    tmp_path: Path,
) -> None:
    write_ideal_runs(tmp_path / "0", "dense", "latent-64")
    write_ideal_runs(tmp_path / "1", "heads-64-64")
    write_report([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    rows = json.loads((tmp_path / "out.json").read_text())["models"]
    assert [row["name"] for row in rows] == ["dense", "heads-64-64", "latent-64"]
    assert rows[1]["phases"]["prefill"]["realized"] == pytest.approx(1)
    assert "On a GPU beside it: heads-64-64." in (tmp_path / "out.md").read_text()
    with pytest.raises(SystemExit, match=r"latent-64 is in a directory before it"):
        write_report([tmp_path / "0", tmp_path / "0"], tmp_path / "out")


# As CUPTI names them; launches and microseconds a step.
KERNELS = {
    "nvjet_sm90_tst_448x64_64x3_1x2_h_bz_coopB_TNN": [32.0, 2000.0],
    "void cublasLt::splitKreduce_kernel<32, 16, int>": [32.0, 100.0],
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<": [
        32.0,
        10.0,
    ],
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_obj": [32.0, 20.0],
    "split_kv": [32.0, 30.0],
    "_swiglu": [32.0, 50.0],
    "merge": [32.0, 40.0],
    "_rotate": [32.0, 5.0],
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>": [32.0, 6.0],
    "triton_red_fused_fused_add_rms_norm_0": [32.0, 0.5],
    "_gather_block_tables_kernel": [1.0, 0.25],
}


def test_a_traced_step_is_told_by_what_kernels_are_for(tmp_path: Path) -> None:
    write_ideal_runs(tmp_path, "dense", "heads-64-64")
    path = tmp_path / "heads-64-64.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"kernels": {"128x2048->256": KERNELS}})
    )
    write_report([tmp_path], tmp_path / "out")
    (step,) = json.loads((tmp_path / "out.json").read_text())["models"][1][
        "step_microseconds"
    ].values()
    assert step == {"rotating, caching": 11, "attention": 100, "GEMM": 2150, "rest": 0.8}
    row = "| heads-64-64 | 128x2048->256 | 0.01 | 0.10 | 2.15 | 0.00 | 2.26 |"
    assert row in (tmp_path / "out.md").read_text()


def test_a_kernel_that_waits_for_another_counts_from_its_end() -> None:
    kernels = [("merge", 1, 12), ("split_kv", 0, 10), ("rotate", 20, 21), ("merge", 20.5, 20.7)]
    assert alone(kernels) == {"split_kv": (1, 10), "merge": (2, 2), "rotate": (1, 1)}
    assert gaps(kernels) == [8]


def test_a_report_without_the_dense_model_is_refused(tmp_path: Path) -> None:
    for name in ("run", "roofs"):
        facts = {"shape": "tiny", "bytes_per_second": 1e9, "flops_per_second": 1e9}
        (tmp_path / f"{name}.json").write_text(json.dumps(facts))
    with pytest.raises(SystemExit, match=r"dense\.json is missing"):
        results(tmp_path)


def test_the_committed_page_is_that_of_the_committed_result() -> None:
    folder = Path("benchmarks/results")
    result = json.loads((folder / "low_rank_models_h200.json").read_text())
    committed = (folder / "low_rank_models_h200.md").read_text()
    assert markdown(result, "low_rank_models_h200.svg") == committed

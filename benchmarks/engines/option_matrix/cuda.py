"""The cells that are served on a GPU: options that only a GPU has."""

from collections.abc import Mapping
from typing import Any

from benchmarks.engines.option_matrix.cells import Cell, Factors, Level, cells_of, rows_of
from benchmarks.engines.option_matrix.pairs import Pair, Row

# Few graphs and little memory, because engines run side by side.
_SIZES = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
COMMON = {
    "load_format": "gac",
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.05,
    "compilation_config": _SIZES,
    "disable_log_stats": True,
}
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
COMPILED = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}


def _ngram(drafted: int) -> dict[str, Any]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": drafted, **lookup}}


FACTORS: Factors = {
    "model": {
        model: Level()
        for model in (
            "every shape",
            "misaligned",
            "latent",
            "mixed heads",
            "low rank",
            "window",
        )
    },
    "graphs": {
        "breakable graphs": Level(),
        "compiled": Level(env=COMPILED),
        "eager": Level({"enforce_eager": True, "compilation_config": {}}),
    },
    "drafts": {
        "no drafts": Level(),
        "4 drafts": Level(_ngram(4)),
        "7 drafts": Level(_ngram(7)),
    },
    "weights": {
        "bf16": Level(),
        "fp8_per_tensor": Level({"quantization": "fp8_per_tensor"}, rounds=True),
        "fp8_per_block": Level({"quantization": "fp8_per_block"}, rounds=True),
    },
    "KV cache": {"bf16 cache": Level(), "fp8 cache": Level({"kv_cache_dtype": "fp8"}, rounds=True)},
    "layout": {
        "layout by default": Level(),
        "NHD": Level(env={"VLLM_KV_CACHE_LAYOUT": "NHD"}),
        "HND": Level(env={"VLLM_KV_CACHE_LAYOUT": "HND"}),
    },
    "prefill": {
        "chunks of 96": Level(),
        "chunks of 33, of long prompts 17": Level(
            {"max_num_batched_tokens": 33, "long_prefill_token_threshold": 17}
        ),
        "whole prompts": Level({"max_num_batched_tokens": 1024}),
    },
    "prefix cache": {
        "prefix cache": Level(),
        "no prefix cache": Level({"enable_prefix_caching": False}),
    },
    "scheduling": {
        "scheduling by default": Level(),
        "not async": Level({"async_scheduling": False}),
    },
}
IMPOSSIBLE: Mapping[str, list[Row]] = {
    "nine shapes compile for minutes; the other models have each of these shapes": [
        {"model": "every shape", "graphs": "compiled"}
    ],
}


def _one(name: str, model: str = "misaligned", refused: str | None = None, **more: Any) -> Cell:
    """A cell beside the pairs: `more` has fields of Cell and engine options, by name."""
    fields = {key: more.pop(key) for key in ("env", "ask", "against", "rounds") if key in more}
    return Cell(name, model, COMMON | more, refused=refused, **fields)


def _graphs(mode: str, **more: Any) -> dict[str, Any]:
    return {"compilation_config": {"cudagraph_mode": mode, **_SIZES, **more}}


SINGLES: list[Cell] = [
    *(
        _one(f"{mode}, compiled", "selected pairs", env=COMPILED, **_graphs(mode))
        for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    ),
    *(
        _one(f"{mode}, breakable", "every shape", **_graphs(mode))
        for mode in ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    ),
    _one("-O0", "every shape", optimization_level=0),
    # the KV cache
    _one("KV cache fp8_e4m3", kv_cache_dtype="fp8_e4m3", rounds=True),
    _one("KV cache bfloat16", kv_cache_dtype="bfloat16"),
    _one(
        "KV cache fp8 but for layer 0",
        "every shape",
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=["0"],
        rounds=True,
    ),
    _one("fp16", "every shape", dtype="float16"),
    _one("fp32", dtype="float32", refused="--dtype"),
    *(
        _one(f"KV cache {dtype}", kv_cache_dtype=dtype, refused=f"--kv-cache-dtype: is {dtype}")
        for dtype in ("fp8_e5m2", "int8_per_token_head", "turboquant_k8v4", "nvfp4")
    ),
    *(_one(f"blocks of {size}", "selected pairs", block_size=size) for size in (16, 32, 128)),
    _one("few blocks", "selected pairs", block_size=16, num_gpu_blocks_override=40),
    *(
        _one(f"layout {layout}", "selected pairs", env={"VLLM_KV_CACHE_LAYOUT": layout})
        for layout in ("BLHNC", "BLNHC")
    ),
    *(
        _one(
            f"layout {layout}",
            "selected pairs",
            env={"VLLM_KV_CACHE_LAYOUT": layout},
            refused="(?i)layout",
        )
        for layout in ("LHBNC", "BHLNC")
    ),
    _one("KV offloading of 1 GiB", "selected pairs", kv_offloading_size=1.0),
    _one("sleep", "selected pairs", ask="slept", enable_sleep_mode=True),
    _one("1 GB of weights offloaded", "selected pairs", cpu_offload_gb=1.0),
    # attention by name
    *(
        _one(f"attention {backend}", "stock sizes", attention_backend=backend)
        for backend in ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
    ),
    *(
        _one(f"attention {backend}, selected pairs", "selected pairs", attention_backend=backend)
        for backend in ("FLASH_ATTN", "TRITON_ATTN")
    ),
    # speculation
    *(_one(f"{n} drafts", "selected pairs", **_ngram(n)) for n in (1, 2, 3)),
    _one("8 drafts", refused="num_speculative_tokens is 8", **_ngram(8)),
    # refused
    _one("batch invariance", env={"VLLM_BATCH_INVARIANT": "1"}, refused="VLLM_BATCH_INVARIANT"),
    # others
    _one("LoRA", "selected pairs", enable_lora=True, max_lora_rank=8),
    _one("LoRA, compiled", "latent", enable_lora=True, max_lora_rank=8, env=COMPILED),
    _one("embeddings", "selected pairs", ask="embed", runner="pooling", convert="embed"),
    _one("prompts as embeddings", "selected pairs", ask="prompt_embeds", enable_prompt_embeds=True),
    _one("structured outputs", "selected pairs", ask="structured"),
    _one("structured outputs, drafted for", "selected pairs", ask="structured", **_ngram(4)),
    _one(
        "drafts by n-grams on the GPU",
        "selected pairs",
        speculative_config={
            "method": "ngram_gpu",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 3,
        },
    ),
    _one("SVD-LLM", "SVD-LLM"),
    _one("int8", "every shape int8"),
    _one("not padded", model_loader_extra_config={"align": "none"}),
    _one(
        "padded as measured",
        "selected pairs",
        model_loader_extra_config={"align": "measured", "gpu": "h200"},
    ),
]
_TWO: Mapping[str, Mapping[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}
_ON_TWO: Mapping[str, Mapping[str, Any]] = {
    "mixed heads": {},
    "low rank": {},
    "misaligned": {"kv_cache_dtype": "fp8", "rounds": True},
}
RANKS: list[Cell] = [
    _one(f"{ranks}, {model}", model, **options, **more)
    for ranks, options in _TWO.items()
    for model, more in _ON_TWO.items()
]


def cells() -> tuple[list[Cell], list[Pair]]:
    """All cells, the longest first, and the pairs that no cell has."""
    from torch.cuda import device_count

    rows, missing = rows_of(FACTORS, IMPOSSIBLE)
    found = [*cells_of(rows, FACTORS, COMMON), *SINGLES, *(RANKS if device_count() > 1 else [])]
    return sorted(found, key=lambda cell: cell.env != COMPILED), missing

"""The cells that are served on a CPU."""

from collections.abc import Mapping
from typing import Any

from benchmarks.engines.option_matrix.cells import Cell, Factors, Level, cells_of, rows_of
from benchmarks.engines.option_matrix.pairs import Pair, Row

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
COMMON = {
    "load_format": "gac",
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 96,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.1,
    "disable_log_stats": True,
}
TRACED: Mapping[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"},
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
MODELS = (
    "every shape",
    "stock sizes",
    "selected pairs",
    "mixed heads",
    "latent",
    "low rank",
    "misaligned",
    "one key head",
    "tied, llama3",
    "window",
    "dense",
    "SVD-LLM",
    "PaLU",
    "low rank int8",
)
# The first level of each factor is vLLM's default or a value of COMMON.
FACTORS: Factors = {
    "model": {model: Level() for model in MODELS},
    "dtype": {
        "fp32": Level(),
        "bf16": Level({"dtype": "bfloat16"}),
        "fp16": Level({"dtype": "float16"}),
    },
    "prefix cache": {
        "prefix cache": Level(),
        "no prefix cache": Level({"enable_prefix_caching": False}),
    },
    "prefill": {
        "chunks of 96": Level(),
        "chunks of 33, of long prompts 17": Level(
            {"max_num_batched_tokens": 33, "long_prefill_token_threshold": 17}
        ),
        "whole prompts": Level({"max_num_batched_tokens": 1024, "enable_chunked_prefill": False}),
    },
    "blocks": {
        "default blocks": Level(),
        "blocks of 32, few": Level({"block_size": 32, "num_gpu_blocks_override": 20}),
        "blocks of 128": Level({"block_size": 128}),
    },
    "sequences": {"4 sequences": Level(), "1 sequence": Level({"max_num_seqs": 1})},
    "execution": {"eager": Level(), "traced": Level(TRACED)},
    "speculation": {"no drafts": Level(), "n-grams": Level({"speculative_config": NGRAM})},
    "adapters": {
        "no adapter": Level(),
        "LoRA": Level({"enable_lora": True, "max_lora_rank": 8}),
    },
    "scheduling": {
        "scheduling by default": Level(),
        "async": Level({"async_scheduling": True}),
        "not async": Level({"async_scheduling": False}),
    },
    "padding": {
        "minimal": Level(),
        "optimal": Level({"model_loader_extra_config": {"align": "optimal"}}),
        "predefined": Level({"model_loader_extra_config": {"align": "predefined"}}),
    },
    "load format": {"gac": Level(), "auto": Level({"load_format": "auto"})},
}
_IMPORTED = ("SVD-LLM", "PaLU")
_PACKED = ("low rank int8",)
_MODELS_BY_REASON = {
    "packed tensors cannot be padded; the refusal is a cell of its own": [
        {"model": model, "padding": padding}
        for model in _PACKED
        for padding in ("optimal", "predefined")
    ],
    "the tests cannot merge an adapter into the values of a packed model": [
        {"model": model, "adapters": "LoRA"} for model in _PACKED
    ],
    "the tests make adapters for our own tensor names only": [
        {"model": model, "adapters": "LoRA"} for model in (*_IMPORTED, "dense")
    ],
}
IMPOSSIBLE: Mapping[str, list[Row]] = {
    **_MODELS_BY_REASON,
    "vLLM 0.32's int8 kernels for CPUs with AMX take bf16 only; fp32 is an error, fp16 aborts": [
        {"model": model, "dtype": dtype} for model in _PACKED for dtype in ("fp32", "fp16")
    ],
    "vLLM decides n-gram drafts step by step; the refusal is a cell of its own": [
        {"speculation": "n-grams", "scheduling": "async"}
    ],
}
# Several ranks start slowly on a CPU, so they have fewer factors. Pipeline stages are traced: they
# need the first pass that vLLM 0.32 for CPU does not make when eager.
RANKS: Factors = {
    "model": {model: Level() for model in ("every shape", "low rank", "one key head", "PaLU")},
    "ranks": {
        "TP 2": Level({"tensor_parallel_size": 2}),
        "PP 2": Level({"pipeline_parallel_size": 2, **TRACED}),
    },
    "dtype": {"fp32": Level(), "bf16": Level({"dtype": "bfloat16"})},
    "speculation": {"no drafts": Level(), "n-grams": Level({"speculative_config": NGRAM})},
    "adapters": FACTORS["adapters"],
    "prefill": FACTORS["prefill"],
}


def _one(name: str, model: str = "selected pairs", refused: str | None = None, **more: Any) -> Cell:
    """A cell beside the pairs: `more` has fields of Cell and engine options, by name."""
    fields = {key: more.pop(key) for key in ("env", "ask", "against", "rounds") if key in more}
    return Cell(name, model, COMMON | more, refused=refused, **fields)


def _align(align: str, **more: Any) -> dict[str, Any]:
    return {"model_loader_extra_config": {"align": align, **more}}


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
SINGLES: list[Cell] = [
    # compiled for real
    *(
        _one(f"{model}, compiled", model, enforce_eager=False)
        for model in ("every shape", "low rank")
    ),
    *(_one(f"-O{level}", enforce_eager=False, optimization_level=level) for level in (0, 1)),
    # the KV cache
    *(
        # many layers: for some dtypes vLLM leaves the first and the last one unquantized
        _one(
            f"KV cache {dtype}",
            "every shape",
            kv_cache_dtype=dtype,
            refused=rf"kv.cache.dtype.*{dtype}",
        )
        for dtype in ("fp8", "fp8_e5m2", "int8_per_token_head", "turboquant_k8v4", "nvfp4")
    ),
    _one("KV cache bfloat16", kv_cache_dtype="bfloat16", dtype="bfloat16"),
    _one("KV cache bfloat16 of fp32", kv_cache_dtype="bfloat16"),
    _one("KV layout NHD", env={"VLLM_KV_CACHE_LAYOUT": "NHD"}, refused="(?i)layout"),
    _one("KV layout HND", env={"VLLM_KV_CACHE_LAYOUT": "HND"}),
    _one("blocks of 16", block_size=16),
    _one("blocks of 48", "every shape", block_size=48, refused="block size"),
    _one("no hybrid manager", "window", disable_hybrid_kv_cache_manager=True),
    _one("hybrid manager", "window", disable_hybrid_kv_cache_manager=False),
    _one("window disabled", "window", disable_sliding_window=True, refused="sliding.window"),
    _one("KV sharing, fast prefill", kv_sharing_fast_prefill=True),
    _one("prefix matches of 16", prefix_match_unit=16),
    _one("hashes by xxhash", prefix_caching_hash_algo="sha256_cbor"),
    _one("KV offloading by 1 GiB", kv_offloading_size=1.0),
    *(
        _one(f"connector {name}", kv_transfer_config=_transfer, refused=refused)
        for name, _transfer, refused in (
            (
                "ExampleConnector",
                {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
                None,
            ),
            (
                "NixlConnector",
                {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                "--kv-transfer-config: NixlConnector",
            ),
            (
                "LMCacheConnectorV1",
                {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
                "--kv-transfer-config: LMCacheConnectorV1",
            ),
        )
    ),
    # memory
    _one("1 GB of weights offloaded", cpu_offload_gb=1.0),
    _one("weights offloaded by groups", offload_backend="prefetch", offload_group_size=2),
    _one("sleep mode", enable_sleep_mode=True, refused="(?i)sleep"),
    # quantization
    *(
        _one(
            f"quantized as {name}",
            quantization=name,
            dtype="bfloat16",
            refused=refused,
            rounds=True,
        )
        for name, refused in (
            ("fp8_per_tensor", "static_scaled_fp8_quant"),  # vLLM for CPU lacks this op
            ("fp8_per_block", None),
            ("mxfp8", "MXFP8"),
            ("int8_per_channel_weight_only", None),  # quantizes experts only
        )
    ),
    *(
        _one(f"quantized as {name}", quantization=name, refused=f"(?i){name}")
        for name in ("awq", "gptq", "bitsandbytes")
    ),
    *(
        _one(
            f"{model}, padded to {align}",
            model,
            refused="--model-loader-extra-config: align",
            **_align(align),
        )
        for model, align in (("every shape int8", "optimal"), ("low rank int8", "predefined"))
    ),
    # loading
    _one("safetensors", load_format="safetensors"),
    _one("random weights", load_format="dummy", ask="starts"),
    _one("random weights by gac", ask="starts", model_loader_extra_config={"weights": "dummy"}),
    _one("pickles", load_format="pt", refused="(?i)load.format|safetensors|gac"),
    _one("misaligned, not padded", "misaligned", **_align("none")),
    _one("every shape, not padded", "every shape", **_align("none")),
    _one("padded as measured, GPU named", **_align("measured", gpu="h200")),
    _one("no generation config", generation_config="vllm"),
    _one(
        "model_impl transformers", model_impl="transformers", refused="(?i)model.impl|transformers"
    ),
    _one("model_impl vllm", model_impl="vllm"),
    _one(
        "another class of vLLM's",
        model_class_overrides={
            "GacLlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"
        },
        refused="(?i)class|gac",
    ),
    # config.json overridden
    _one("theta", "stock sizes", hf_overrides=THETA, against="stock sizes, theta"),
    *(
        _one(f"theta of {model}", model, hf_overrides=THETA, refused="(?i)rope")
        for model in ("selected pairs", "mixed heads", "every shape")
    ),
    *(
        _one(f"theta of {model}", model, hf_overrides=THETA, against=f"{model}, theta")
        for model in ("latent", "SVD-LLM")
    ),
    _one(
        "llama3",
        "stock sizes",
        hf_overrides={
            "rope_parameters": {"rope_theta": 10000.0}
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
        },
        against="stock sizes, llama3",
    ),
    _one(
        "yarn",
        "stock sizes",
        hf_overrides={
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 512,
            }
        },
        against="stock sizes, yarn",
    ),
    _one(
        "another window",
        "stock sizes, window",
        hf_overrides={"sliding_window": 32},
        against="stock sizes, window 32",
    ),
    _one("longer positions", hf_overrides={"max_position_embeddings": 4096}, max_model_len=2048),
    _one("more heads", hf_overrides={"num_key_value_heads": 8}, refused="(?i)heads"),
    _one("a longer context than positions", max_model_len=4096, refused="max_model_len"),
    # speculation
    _one(
        "drafts by a dense model",
        speculative_config={"model": "dense", "num_speculative_tokens": 3},
    ),
    _one(
        "drafts by a gac model",
        speculative_config={"model": "stock sizes", "num_speculative_tokens": 3},
        refused="--speculative-config",
    ),
    *(
        _one(
            f"{drafted} drafts by n-grams",
            "every shape",
            speculative_config=NGRAM | {"num_speculative_tokens": drafted},
        )
        for drafted in (1, 7, 8)
    ),
    _one(
        "n-grams, async",
        speculative_config=NGRAM,
        async_scheduling=True,
        refused="(?i)async scheduling",
    ),
    # adapters
    _one(
        "LoRA sharded on 2 ranks",
        enable_lora=True,
        max_lora_rank=8,
        fully_sharded_loras=True,
        tensor_parallel_size=2,
    ),
    # blocks that short prompts fill, so that the second answers come from the prefix cache
    _one("LoRA of every shape", "every shape", block_size=32, enable_lora=True, max_lora_rank=8),
    _one(
        "LoRA in bf16",
        block_size=32,
        enable_lora=True,
        max_lora_rank=8,
        lora_dtype="bfloat16",
        dtype="bfloat16",
    ),
    # requests of other kinds
    *(
        _one(f"embeddings of {model}", model, ask="embed", runner="pooling", convert="embed")
        for model in ("every shape", "window", "SVD-LLM")
    ),
    _one("embeddings in bf16", ask="embed", runner="pooling", convert="embed", dtype="bfloat16"),
    _one(
        "embeddings on 2 ranks",
        ask="embed",
        runner="pooling",
        convert="embed",
        tensor_parallel_size=2,
    ),
    _one(
        "classify without a head",
        runner="pooling",
        convert="classify",
        refused="(?i)classif|score|head",
    ),
    _one("structured outputs", ask="structured"),
    _one("structured outputs, drafted for", ask="structured", speculative_config=NGRAM),
    *(
        _one(
            f"structured outputs by {backend}",
            ask="structured",
            structured_outputs_config={"backend": backend},
        )
        for backend in ("xgrammar", "guidance")
    ),
    _one("prompts as embeddings", ask="prompt_embeds", enable_prompt_embeds=True),
    _one(
        "prompts as embeddings, every shape",
        "every shape",
        ask="prompt_embeds",
        enable_prompt_embeds=True,
    ),
    # ranks
    _one(
        "context of decoding on 2 ranks",
        decode_context_parallel_size=2,
        tensor_parallel_size=2,
        refused="--decode-context-parallel-size",
    ),
    _one(
        "context of prefill on 2 ranks", prefill_context_parallel_size=2, refused="context.parallel"
    ),
    _one("TP 3", tensor_parallel_size=3, refused="(?i)tensor.parallel|divi|heads"),
    _one(
        "TP 2 of stages 2",
        "every shape",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        **TRACED,
    ),
    # scheduling
    _one("by priority", scheduling_policy="priority"),
    _one("attention backend named", attention_backend="TRITON_ATTN"),
    _one("a linear backend of GPUs", linear_backend="triton"),
    _one("throughput mode", performance_mode="throughput"),
    _one("logits instead of logprobs", logprobs_mode="processed_logprobs"),
]


def cells() -> tuple[list[Cell], list[Pair]]:
    """All cells, and the pairs that no cell has."""
    rows, missing = rows_of(FACTORS, IMPOSSIBLE)
    ranks, more = rows_of(RANKS, IMPOSSIBLE)
    served = [*cells_of(rows, FACTORS, COMMON), *SINGLES, *cells_of(ranks, RANKS, COMMON)]
    return served, [*missing, *more]

"""Perplexity and KV room of a small model of each family: dense, compressed and served.

    python -m benchmarks.engines.families OUT [--device cuda]  # families.json and .md

Each model has random weights that are trained briefly on the demo model's calibration text. That
is enough for a perplexity that compression can make worse, and tells nothing about what a model
that people use would lose. Each is compressed by the verbs' steps, and both are computed by the
fp32 reference and served by vLLM, which also says how many tokens its cache holds.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.families import FAMILIES
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress import compress
from vllm_gac.steps.compress_request import CompressRequest
from vllm_gac.steps.evaluate import evaluate

COMMAND = "python -m benchmarks.engines.families"
REQUEST = PlanRequest(param_ratio=0.9, kv_ratio=0.6)
OF_EXPERTS = PlanRequest(kv_ratio=0.6, methods=("heads",))
LENGTH, BATCH = 64, 8
CACHE_BYTES = 1 << 28
_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
# A head size of its own, a window, experts, and a token that the vocabulary has.
_OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "phi3": {"pad_token_id": None},
}


def main() -> None:
    """Measure every family, and write the two files of the result."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of training; default: 300")
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="to calibrate and to evaluate on; default: 16384"
    )
    options = parser.parse_args()
    directories = []
    with tempfile.TemporaryDirectory() as work:
        for family in FAMILIES:
            dense, small = Path(work) / family, Path(work) / f"{family}-gac"
            train(family, dense, options.steps, options.device)
            compress(
                dense,
                small,
                OF_EXPERTS if FAMILIES[family].has_experts else REQUEST,
                CompressRequest(max_tokens=options.tokens, sequence_length=LENGTH),
                calibration=[demo.CALIBRATION],
                device=options.device,
                progress=False,
            )
            directories += [dense, small]
            print(f"{family}: trained and compressed", flush=True)
        said = in_one_engine_process(directories, options.tokens)
        rows = [
            measured(directory, engine, options.tokens, options.device)
            for directory, engine in zip(directories, said, strict=True)
        ]
    command = f"{COMMAND} OUT --steps {options.steps} --tokens {options.tokens}"
    result = provenance(command, options.device, options.commit) | {
        "vllm": metadata.version("vllm")
    }
    result |= {"steps": options.steps, "tokens": options.tokens, "rows": rows}
    save(options.out / "families", result, page(result))


def train(family: str, directory: Path, steps: int, device: str) -> None:
    """Write a model of `family` that was trained for `steps` batches, with the demo's tokenizer."""
    from tokenizers import Tokenizer
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    text = torch.tensor(tokenizer.encode(demo.CALIBRATION.read_text()).ids)
    shape = _SHAPE | _OWN.get(family, {}) | {"vocab_size": tokenizer.get_vocab_size()}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape)).to(device).train()
    learner = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(learner, steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + LENGTH] for start in starts]).to(device)
        loss = model(batch, labels=batch).loss
        learner.zero_grad()
        loss.backward()
        learner.step()
        falling.step()
    model.bfloat16().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((demo.MODEL / name).read_bytes())


def measured(directory: Path, engine: dict[str, Any], tokens: int, device: str) -> dict[str, Any]:
    """One row of the table: the model in `directory` by the reference, and what vLLM said of it."""
    layout = open_checkpoint(directory).layout
    perplexity, _ = evaluate(
        directory, [demo.HELD_OUT], sequence_length=LENGTH, max_tokens=tokens, device=device
    )
    block_bytes = engine["block_size"] * engine["element_bytes"] * layout.kv_elements
    row = {
        "model": directory.name,
        "parameters": layout.parameters,
        "KV numbers per token": layout.kv_elements,
        "perplexity, reference": round(perplexity, 3),
        "perplexity, vLLM": round(engine["perplexity"], 3),
        "cache blocks": engine["blocks"],
        "blocks by the layout": CACHE_BYTES // block_bytes,
    }
    print(row, flush=True)
    return row


def in_one_engine_process(directories: list[Path], tokens: int) -> list[dict[str, Any]]:
    """What `served` returns for each of `directories`, from a process of vLLM's."""
    code = (
        "import json, sys; from benchmarks.engines.families import served; "
        "print(json.dumps([served(d, int(sys.argv[1])) for d in sys.argv[2:]]))"
    )
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tokens), *map(str, directories)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return said


def served(directory: str, tokens: int) -> dict[str, Any]:
    """The perplexity and the cache blocks of a model that vLLM runs in this process."""
    from vllm import LLM, SamplingParams

    from vllm_gac.steps.evaluate import window_batches

    llm = LLM(
        directory,
        load_format="gac",
        enforce_eager=True,
        max_model_len=LENGTH + 1,
        max_num_seqs=16,
        kv_cache_memory_bytes=CACHE_BYTES,
        gpu_memory_utilization=0.05,  # what must be free at the start
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    score = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    texts = [demo.HELD_OUT]
    for batch in window_batches(Path(directory), texts, length=LENGTH, max_tokens=tokens):
        prompts = [{"prompt_token_ids": window} for window in batch.tolist()]
        for output in llm.generate(prompts, score, use_tqdm=False):
            ids, steps = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
            total -= sum(step[token].logprob for token, step in zip(ids, steps, strict=True))
            count += len(ids)
    config = llm.llm_engine.vllm_config
    return {
        "perplexity": math.exp(total / count),
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "element_bytes": config.model_config.dtype.itemsize,
    }


def page(result: dict[str, Any]) -> str:
    """The Markdown page of a result."""
    return "\n".join(
        [
            "# A small model of each family, dense, compressed and served",
            "",
            f"{origin(result)}.",
            "",
            f"Random weights, trained for {result['steps']} batches of {BATCH * LENGTH} tokens: "
            "the perplexities compare rows of a family, and tell nothing about models that people "
            "use. The less a model has learnt, the less compression can make it worse. "
            f"Compressed to {REQUEST.param_ratio} of the parameters and {REQUEST.kv_ratio} of "
            "the KV cache; of a mixture of experts, the cache alone. "
            f"Perplexity of {result['tokens']:,} held-out tokens in windows of "
            f"{LENGTH}: by the fp32 reference, and by vLLM in bf16. The last two columns are the "
            f"blocks of vLLM's cache of {CACHE_BYTES >> 20} MiB, as vLLM says and as follows from "
            "the layout.",
            "",
            *table_of_records(result["rows"]),
            "",
        ]
    )


if __name__ == "__main__":
    main()

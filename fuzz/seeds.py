"""Write the seeds of the corpora: a sound model in each format, and a sound file of each kind.

python -m fuzz.seeds
"""

import io
import json
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fuzz.framing import SEPARATOR, joined
from tests.hostile.formats import CONFIGS, written_tensors
from tests.support.model_files import config, shard_bytes, write_model

CORPUS = Path(__file__).parent / "corpus"


def seed(name: str) -> bytes:
    """The input of models.py for a model in the format `name`."""
    shard = shard_bytes(written_tensors(name))
    length = int.from_bytes(shard[:8], "little")
    return joined(json.dumps(CONFIGS[name]).encode(), shard[8 : 8 + length])


def documents() -> dict[str, bytes]:
    """One input of documents.py for each kind, by name."""
    content = {
        "plan": _plan(),
        "problem": json.dumps(_PROBLEM).encode(),
        "profile": json.dumps(_PROFILE).encode(),
        "statistics": _statistics(),
        "pickle": _pickle(),
    }
    return {kind: kind.encode() + SEPARATOR + data for kind, data in content.items()}


_PROBLEM = {
    "budgets": {"params": 9, "kv": 5},
    "items": [
        {
            "name": name,
            "candidates": [
                {"dim": 96, "costs": {"params": 3, "kv": 1}, "value": 4.5},
                {"dim": 112, "costs": {"params": 5, "kv": 2}, "value": 5.0},
            ],
        }
        for name in ("a", "b")
    ],
}

_SWEEP = {"dims": [8, 16, 64], "microseconds": [1.0, 2.0, 3.0]}
_PROFILE: dict[str, Any] = {
    "version": 1,
    "gpu": "a GPU",
    "measured": "2026-11-22",
    "software": {"torch": "2.13.0"},
    "method": "by hand",
    "noise": 0.02,
    "attention": [
        _SWEEP | {"kernel": "k", "batch": 1, "length": 64, "heads": 4, "causal": True},
    ],
    "gemm": [_SWEEP | {"role": "any", "axis": "n", "m": 64, "fixed": 32}],
    "ceilings": {"terabytes_per_second": 4.0, "teraflops": 700.0},
    "decode": [
        {
            "kernel": kernel,
            "form": "rotary",
            "query_heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "key_heads": 2,
            "key_size": size,
            "value_heads": 2,
            "value_size": size,
            "batch": batch,
            "context": context,
            "microseconds": float(size * batch),
        }
        for kernel in ("gac", "stock")
        for size in (8, 16)
        for batch, context in ((1, 64), (64, 2048))
    ],
    "prefill": [
        _SWEEP | {"kernel": "k", "batch": 1, "length": 64, "heads": 4, "causal": True},
    ],
    "linear": [_SWEEP | {"axis": axis, "m": m, "fixed": 32} for axis in "nk" for m in (1, 64)],
    "swiglu": [
        {"tokens": tokens, "features": 4096, "width": 8, "microseconds": 9.0} for tokens in (1, 32)
    ],
    "sustained": [{"m": 64, "n": 64, "k": 64, "seconds": 1.0, "microseconds": 4.0}],
    "low_rank": [
        {
            "tokens": tokens,
            "in_size": 32,
            "out_sizes": [64] * count,
            "ranks": [8] * count,
            "is_gated": count == 2,
            "microseconds": 10.0 * count,
        }
        for tokens in (1, 64)
        for count in (1, 2)
    ],
}


def _plan() -> bytes:
    from vllm_gac.checkpoint.open import open_checkpoint
    from vllm_gac.planning.planner import prior_plan
    from vllm_gac.planning.request import PlanRequest

    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory, "model"), config())
        model = open_checkpoint(Path(directory, "model"))
        plan = prior_plan(model, PlanRequest(param_ratio=0.8, kv_ratio=0.5))
    return plan.model_dump_json().encode()


def _statistics() -> bytes:
    """Statistics with a header as compression/statistics_file.py writes it.

    Every four bytes are those of the token 1, and as a float a little above 0.
    """
    import hashlib

    from vllm_gac.compression.measured import STATISTICS, Measured
    from vllm_gac.compression.statistics_writer import stats_file
    from vllm_gac.layout.dims import layout_of

    metadata = {
        "model_config_sha256": hashlib.sha256(json.dumps(config()).encode()).hexdigest(),
        "format": "3",
        "covariances": ",".join(STATISTICS),
        "metrics": "self_attn.k_proj",
        "methods": "heads,prune",
        "value_group": "2",
        "tokens": "1024",
        "sequence_length": "64",
        "probe_tokens": "64",
    }
    header = stats_file(Path(), layout_of(config(), "config.json"), Measured.of(metadata)).header
    return header[8:] + SEPARATOR + struct.pack("<i", 1)


def _pickle() -> bytes:
    """The pickle program of a model by SVD-LLM, without its storages."""
    from tests.checkpoint.pickles import foreign
    from tests.importers.pickled_models import svd_llm

    file = io.BytesIO()
    foreign.save(file, {"model": svd_llm()})
    with zipfile.ZipFile(file) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


if __name__ == "__main__":
    for folder, seeds in (
        ("models", {name: seed(name) for name in CONFIGS}),
        ("documents", documents()),
    ):
        (CORPUS / folder).mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (CORPUS / folder / name).write_bytes(data)

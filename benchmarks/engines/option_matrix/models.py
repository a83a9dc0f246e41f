"""The models of the matrix: tiny random ones, one for each kind of layer, made once."""

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.importers.low_rank_models import RANKS, TOOLS, low_rank
from tests.importers.palu_models import palu, ranks_of
from tests.importers.tools import write
from tests.serving.adapters import write_adapter
from tests.serving.models import (
    HEAD_DIM,
    HETEROGENEOUS,
    KV_HEADS,
    QUERY_HEADS,
    layer,
    layout_with,
    write_model,
)
from tests.serving.quantized import write_quantized
from tests.support import dense_models
from vllm_gac import demo
from vllm_gac.steps.repair import repair

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
}
THETA = 500000.0
WHOLE = ("rotary", 4, 64), (4, 64)
STOCK = [layer(*WHOLE, 512), layer(*WHOLE, 384)]
LOW_RANK = [
    layer(*WHOLE, 512, {"self_attn.k_proj": 64, "self_attn.v_proj": 72, "mlp.gate_proj": 104}),
    layer(("rotary", 4, 48), (4, 32), 400, {"self_attn.o_proj": 96, "mlp.down_proj": 40}),
]
LATENT = [
    layer(("latent", 4, 32), (2, 48), 256),
    layer(("latent", 2, 64), (2, 64), 512, {"self_attn.q_proj": 96}),
    layer(("latent", 1, 96), (1, 64), 256),
]
# Dense models, of the dims of the gac models.
_GAC = layout_with(STOCK)
DENSE = dense_models.config(
    hidden_size=_GAC.hidden_size,
    intermediate_size=_GAC.layers[0].intermediate_size,
    num_attention_heads=QUERY_HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=_GAC.vocab_size,
    max_position_embeddings=1024,
)
IMPORTED = DENSE | {"hidden_size": 64, "intermediate_size": 96}


def make(work: Path, kinds: Iterable[str]) -> None:
    """Make the models of `kinds` that are not in `work` yet, each in a directory of its name.

    "KIND int8" is KIND repaired and quantized; "KIND int8 rounded", written with it, has the values
    that its integers represent. "KIND adapter" is a LoRA adapter for KIND, and "KIND merged" is
    KIND with the adapter merged in.
    """
    for kind in kinds:
        if directory(work, kind).exists():
            continue
        made = directory(work, f"{kind} being made")
        shutil.rmtree(made, ignore_errors=True)
        base, _, derived = kind.rpartition(" ")
        if derived == "int8":
            _int8(directory(work, base), made, directory(work, f"{kind} rounded"))
        elif derived == "adapter":
            merged = directory(work, f"{base} merged")
            shutil.rmtree(merged, ignore_errors=True)
            write_adapter(directory(work, base), made, merged)
        else:
            KINDS[kind](made)
        made.rename(directory(work, kind))


def directory(work: Path, kind: str) -> Path:
    """The directory of the model of `kind`."""
    return work / kind.replace(",", "").replace(" ", "-")


def _int8(model: Path, out: Path, rounded: Path) -> None:
    repaired = out.with_name(f"{out.name}-repaired")
    for path in (repaired, rounded):
        shutil.rmtree(path, ignore_errors=True)
    repair(model, repaired, progress=False)
    write_quantized(repaired, out, rounded, "W8A8")


def _gac(layers: list[dict[str, Any]], out: Path, **config: Any) -> None:
    write_model(out, layers, **config)


def _dense(out: Path) -> None:
    dense_models.write(out, DENSE, tokenizer=False)
    _add_tokenizer(out)


def _svd_llm(out: Path, **config: Any) -> None:
    raw = IMPORTED | config
    write(out, *low_rank(TOOLS["svd-llm"], raw, RANKS), TOOLS["svd-llm"].rename)
    _add_tokenizer(out)


def _palu(out: Path) -> None:
    ranks = ranks_of([([9, 16], [12, 31]), ([24], [40])])
    raw, model = palu(IMPORTED | {"num_key_value_heads": 4, "head_dim": 32}, ranks)
    write(out, raw, model)
    _add_tokenizer(out)


def _add_tokenizer(out: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, out)


KINDS: dict[str, Callable[[Path], None]] = {
    "every shape": partial(_gac, HETEROGENEOUS),
    "stock sizes": partial(_gac, STOCK),
    "selected pairs": partial(_gac, [HETEROGENEOUS[1], HETEROGENEOUS[2]]),
    "mixed heads": partial(_gac, [HETEROGENEOUS[3], HETEROGENEOUS[4]]),
    "latent": partial(_gac, LATENT),
    "low rank": partial(_gac, LOW_RANK),
    "misaligned": partial(
        _gac, [HETEROGENEOUS[8], layer(("latent", 4, 27), (2, 45), 251, {"mlp.gate_proj": 53})]
    ),
    "one key head": partial(
        _gac, [layer(("rotary", 1, 64), (1, 64), 320), layer(("rotary", 1, 32), (1, 40), 256)]
    ),
    "tied, llama3": partial(
        _gac,
        [layer(*WHOLE, 512), LATENT[0]],
        rope_scaling=LLAMA3,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "window": partial(
        _gac, [HETEROGENEOUS[i] for i in (0, 1, 3, 5)], model_type="mistral", sliding_window=64
    ),
    "stock sizes, window": partial(_gac, STOCK, model_type="mistral", sliding_window=64),
    "stock sizes, window 32": partial(_gac, STOCK, model_type="mistral", sliding_window=32),
    "stock sizes, theta": partial(_gac, STOCK, rope_theta=THETA),
    "stock sizes, llama3": partial(_gac, STOCK, rope_scaling=LLAMA3),
    "stock sizes, yarn": partial(_gac, STOCK, rope_parameters=YARN),
    "latent, theta": partial(_gac, LATENT, rope_theta=THETA),
    "dense": _dense,
    "SVD-LLM": _svd_llm,
    "SVD-LLM, theta": partial(
        _svd_llm, rope_parameters={"rope_type": "default", "rope_theta": THETA}
    ),
    "PaLU": _palu,
}

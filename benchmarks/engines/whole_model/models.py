"""The models, a dense one and compressed variants of its shape, and the batches to time."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.common.llama3_8b import DENSE, compressed
from vllm_gac.layout.dims import LINEARS, ModelLayout, breakeven_rank, layout_of


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


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense model's config, and the batches to time. The last batch is for a few models only."""

    dense: dict[str, Any]
    batches: tuple[Batch, ...]
    engine: dict[str, Any] = field(default_factory=dict)


# The MLP width of Llama-3-8B.
_FULL_WIDTH = 14336
SHAPES = {
    "llama3-8b": Shape(
        DENSE,
        (
            Batch(16, 2048, 1),
            Batch(1, 128, 256, runs=2),
            Batch(64, 128, 256, runs=2),
            Batch(128, 2048, 256, runs=1),
            Batch(256, 2048, 128, runs=1),
        ),
    ),
    "tiny": Shape(
        DENSE
        | {
            "hidden_size": 256,
            "intermediate_size": _FULL_WIDTH // 32,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "head_dim": 64,
            "vocab_size": 1024,
            "max_position_embeddings": 512,
        },
        (Batch(2, 64, 1), Batch(1, 16, 8), Batch(3, 16, 8), Batch(4, 48, 8, 1), Batch(5, 48, 8, 1)),
        {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26},
    ),
}

# The dims below are for Llama-3-8B, whose heads are of 128; other shapes scale them.
WIDTH = 11520
# (r_k, r_v, MLP width) of the classes of layers, which take turns through the model. Together they
# have as many parameters and as large a cache as eight layers of (96, 64, WIDTH).
CLASSES = (
    (128, 96, 12800), (112, 80, 12288), (96, 96, 12032), (96, 64, 11520),
    (80, 64, 11520), (96, 48, 11008), (64, 48, 10752), (80, 32, 10240),
)  # fmt: skip

# Head sizes of PaLU's Llama-3-8B at a ratio of 0.8, by table 7 of "When Smaller Is Slower".
PALU_SIZES = (114, 117, 121, 125)

# Ranks are multiples of a GPU's tile.
RANK_MULTIPLE = 64
RANK_PAST = 37  # by which misaligned ranks are larger


class Dims(NamedTuple):
    """A layer: form, heads and size of the keys, heads and size of the values, and MLP width.

    Sizes and width are for Llama-3-8B; `past` is added to the scaled width.
    """

    form: str
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    width: int = WIDTH
    past: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """One model; `options` are those of --model-loader-extra-config, None if it is dense."""

    name: str
    what: str
    config: dict[str, Any]
    options: dict[str, Any] | None = None

    @property
    def layout(self) -> ModelLayout:
        return layout_of(self.config)

    def write(self, directory: Path) -> None:
        """Write the model's directory: config.json alone, without weights."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")


def models(dense: dict[str, Any]) -> list[Model]:
    """The dense model and the compressed ones, the most informative first."""
    heads, count = dense["num_key_value_heads"], dense["num_hidden_layers"]
    half = heads // 2

    def uniform(name: str, what: str, *dims: Any) -> Model:
        layers = [Dims(*dims)] * count
        return Model(name, f"width {WIDTH}, {what}", _config(dense, layers), {"weights": "dummy"})

    def equal_heads(r_k: int, r_v: int) -> Model:
        what = f"{heads} heads of ({r_k}, {r_v})"
        return uniform(f"heads-{r_k}-{r_v}", what, "rotary", heads, r_k, heads, r_v)

    def grouped(r_k: int) -> Model:
        what = f"{half} heads of ({r_k}, 128) for {heads}"
        return uniform(f"groups-{r_k}-128", what, "rotary", half, r_k, half, 128)

    def plan(past: int) -> dict[str, Any]:
        classes = (CLASSES[i % len(CLASSES)] for i in range(count))
        dims = (Dims("rotary", heads, r_k, heads, r_v, width, past) for r_k, r_v, width in classes)
        return _config(dense, list(dims))

    def palu() -> dict[str, Any]:
        sizes = (PALU_SIZES[i % len(PALU_SIZES)] for i in range(count))
        dims = (Dims("rotary", heads, r, heads, r, _FULL_WIDTH) for r in sizes)
        return _config(dense, list(dims))

    def low_rank(name: str, what: str, linears: Iterable[str], share: float) -> Model:
        return Model(name, what, _low_rank(dense, linears, share), {"weights": "dummy"})

    unpadded = {"weights": "dummy", "align": "none"}
    return [
        Model("dense", "as it was", dense),
        equal_heads(96, 64),
        equal_heads(64, 64),
        equal_heads(96, 96),
        Model(
            "heterogeneous",
            f"{len(CLASSES)} classes of sizes and widths in turn, the bytes of heads-96-64",
            plan(0),
            {"weights": "dummy"},
        ),
        Model("misaligned", "heterogeneous, each width + 1, served unpadded", plan(1), unpadded),
        Model("palu-heads", "heads of 114 to 126, whole MLPs, served unpadded", palu(), unpadded),
        Model("palu-heads-repaired", "the same, padded to load", palu(), {"weights": "dummy"}),
        uniform(
            "latent-64",
            f"{heads} latents of 64, {half} value heads of 128",
            *("latent", heads, 64, half, 128),
        ),
        uniform(
            "latent-128",
            f"{half} latents of 128 for {heads} keys, {half} value heads of 128",
            *("latent", half, 128, half, 128),
        ),
        grouped(192),
        grouped(128),
        equal_heads(128, 128),
        *(
            low_rank(
                f"low-rank-{percent}",
                f"every linear low rank, {percent} % of the parameters",
                LINEARS,
                _share_of_linears(dense, percent / 100),
            )
            for percent in (80, 90, 70)
        ),
        low_rank(
            "low-rank-mlp",
            "MLPs low rank, 75 % of theirs",
            [n for n in LINEARS if "mlp" in n],
            0.75,
        ),
        Model(
            "low-rank-misaligned",
            f"low-rank-80, each rank + {RANK_PAST}, served unpadded",
            _low_rank(dense, LINEARS, _share_of_linears(dense, 0.8), RANK_PAST),
            unpadded,
        ),
    ]


def _share_of_linears(dense: dict[str, Any], share: float) -> float:
    """What linears keep if `share` of all parameters stays, embeddings and norms whole."""
    layout = layout_of(dense)
    layer = layout.layers[0]
    linears = sum(math.prod(layout.linear_shape(layer, name)) for name in LINEARS)
    linears *= len(layout.layers)
    return 1 - (1 - share) * layout.parameters / linears


def _low_rank(
    dense: dict[str, Any], linears: Iterable[str], share: float, past: int = 0
) -> dict[str, Any]:
    """The config of the dense model with `share` of the parameters of `linears`, factorized.

    Each rank is then larger by `past`.
    """
    layout = layout_of(dense)
    layer = layout.layers[0]
    ranks = {}
    for name in linears:
        tiles = breakeven_rank(layout, layer, name, share) / RANK_MULTIPLE
        ranks[name] = RANK_MULTIPLE * max(round(tiles), 1) + past
    factorized = replace(layer, ranks=MappingProxyType(ranks)).section()
    return compressed(dense, [factorized] * len(layout.layers))


def _config(dense: dict[str, Any], layers: list[Dims]) -> dict[str, Any]:
    return compressed(dense, [_section(dense, dims) for dims in layers])


def _section(dense: dict[str, Any], dims: Dims) -> dict[str, Any]:
    head_dim, width = dense["head_dim"], dense["intermediate_size"]
    size = dims.key_size * head_dim // 128
    size += size % 2  # RoPE rotates pairs
    own = (dims.key_heads, size) == (dense["num_key_value_heads"], head_dim)
    return {
        "key": {"form": dims.form, "heads": dims.key_heads, "size": size},
        "value": {"heads": dims.value_heads, "size": dims.value_size * head_dim // 128},
        "intermediate_size": dims.width * width // _FULL_WIDTH + dims.past,
        # Keys that lost pairs have rotation frequencies of their own.
        "rope_table": dims.form == "rotary" and not own,
    }

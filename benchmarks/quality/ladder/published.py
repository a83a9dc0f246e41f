"""What others published of models of 7 and 8 B parameters, beside the ladder.

Each number was read where `source` says. They were not measured here, are of other texts, and are
not compared with each other: papers differ in calibration text, sequence length and what they call
a ratio.
"""

from dataclasses import dataclass

from benchmarks.common.markdown import table

_V2 = "[SVD-LLM V2](https://arxiv.org/abs/2503.12340)"


@dataclass(frozen=True, slots=True)
class Published:
    """A perplexity of WikiText-2, dense and compressed, and where it is printed."""

    method: str
    model: str
    kept: str
    dense: float
    compressed: float
    source: str


PUBLISHED = (
    Published("SVD-LLM", "LLaMA-7B", "80 % of parameters", 5.68, 7.94, f"{_V2}, table 2"),
    Published("SVD-LLM V2", "LLaMA-7B", "80 % of parameters", 5.68, 7.12, f"{_V2}, table 2"),
    Published("SVD-LLM", "LLaMA-3-8B", "80 % of parameters", 6.14, 11.82, f"{_V2}, table 2"),
    Published("SVD-LLM V2", "LLaMA-3-8B", "80 % of parameters", 6.14, 8.01, f"{_V2}, table 2"),
    Published("LLM-Pruner", "LLaMA-7B", "10 GB of weights", 5.68, 9.88, f"{_V2}, table 5"),
    Published("SliceGPT", "LLaMA-7B", "10 GB of weights", 5.68, 8.78, f"{_V2}, table 5"),
    Published("SVD-LLM V2", "LLaMA-7B", "10 GB of weights", 5.68, 7.84, f"{_V2}, table 5"),
    Published(
        "Dobi-SVD",
        "LLaMA-7B",
        "60 % of parameters, factors stored in mixed precision",
        5.68,
        9.07,
        "[Dobi-SVD](https://arxiv.org/abs/2502.02723), abstract; dense: SVD-LLM V2",
    ),
)
# What is known of the others, or that nothing was found.
_OTHERS = (
    "[SVD-LLM's issues](https://github.com/AIoT-MLSys-Lab/SVD-LLM/issues/34) have users who got "
    "14.0 and 14.8 where the paper has 11.82 for LLaMA-3-8B.",
    "MoDeGPT: its [abstract](https://arxiv.org/abs/2408.09632) says that LLaMA-2 and 3 keep 90 to "
    "95 % of their zero-shot performance with 70 to 75 % of the parameters. Its tables were not at "
    "hand.",
    "PaLU, half the cache, Llama-3-8B-Instruct: mean zero-shot accuracy of 66.2 (joint heads) and "
    "64.5 (groups of four) after 67.9, as table 5 of the paper on X-EcoMLA quotes it.",
    "FLAP, Minitron and Puzzletron: no number was found at its source, so there is none here.",
)


def published() -> list[str]:
    """A table of `PUBLISHED`."""
    cells = [
        [p.method, p.model, p.kept, f"{p.dense:.2f}", f"{p.compressed:.2f}", _over(p), p.source]
        for p in PUBLISHED
    ]
    heads = ["method", "model", "kept", "dense", "compressed", "over dense", "source"]
    return [
        "## Published, of 7 and 8 B parameters",
        "",
        "Perplexity on WikiText-2, as printed by others, not measured here. These models were "
        "trained on a trillion tokens and more. They say of what order a loss at 7 and 8 B is; the "
        "models of the ladder are much smaller.",
        "",
        *table(heads, cells),
        "",
        *(f"- {line}" for line in _OTHERS),
    ]


def _over(found: Published) -> str:
    return f"{found.compressed / found.dense:.3f}"

"""What others published of models of 7 and 8 B parameters, beside the ladder.

Each number was read where `source` says. They were not measured here, are of other texts, and are
not compared with each other: papers differ in calibration text, sequence length and what they call
a ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.markdown import table

_V2 = "[SVD-LLM V2](https://arxiv.org/abs/2503.12340)"
_SURVEY = "[a survey's measurements](https://github.com/nyunAI/Faster-LLM-Survey), README"
_MINITRON = "[Minitron](https://arxiv.org/abs/2408.11796), first table"
_PUZZLETRON = (
    "[Model Optimizer](https://github.com/NVIDIA/Model-Optimizer/blob/88ff5549bcea33a0b821b4a37a5c5b"
    "2940de091f/examples/pruning/puzzletron/Llama-3.1-8B-Instruct.md)"
)
_QWEN, _LLAMA = "Qwen3-8B", "Llama-3.1-8B-Instruct"
_WIDTH = "Minitron, width, distilled on 94 B tokens"
_DEPTH = "Minitron, depth, distilled on 94 B tokens"


@dataclass(frozen=True, slots=True)
class Published:
    """A perplexity or an accuracy, dense and compressed, and where it is printed."""

    method: str
    model: str
    kept: str
    dense: float
    compressed: float
    source: str


# Perplexity of WikiText-2.
PERPLEXITIES = (
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
    Published("FLAP", "LLaMA-7B", "20 % sparsity, 9.44 of 12.55 GB", 12.62, 14.62, _SURVEY),
    Published("LLM-Pruner", "LLaMA-7B", "20 % sparsity, 10.09 of 12.55 GB", 12.62, 19.77, _SURVEY),
    Published(
        "LLM-Pruner, finetuned",
        "LLaMA-7B",
        "20 % sparsity, 10.09 of 12.55 GB",
        12.62,
        17.37,
        _SURVEY,
    ),
)
# Accuracy on MMLU, in %.
ACCURACIES = (
    Published("Puzzletron", _QWEN, "80 % of the size", 74.93, 59.10, _PUZZLETRON),
    Published("Puzzletron, distilled", _QWEN, "80 % of the size", 74.93, 69.21, _PUZZLETRON),
    Published("Puzzletron", _LLAMA, "about 69 % of the size", 68.39, 66.26, _PUZZLETRON),
    Published("Puzzletron, distilled", _LLAMA, "about 69 % of the size", 68.39, 64.96, _PUZZLETRON),
    Published("Puzzletron", _LLAMA, "50 % of the size", 68.39, 23.16, _PUZZLETRON),
    Published("Puzzletron, distilled", _LLAMA, "50 % of the size", 68.39, 29.60, _PUZZLETRON),
    Published(_WIDTH, "Llama-3.1-8B", "4.5 of 8 B parameters", 65.3, 60.5, _MINITRON),
    Published(_DEPTH, "Llama-3.1-8B", "4.5 of 8 B parameters", 65.3, 58.7, _MINITRON),
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
    "The survey's dense perplexity of LLaMA-7B is 12.62, and not 5.68 as elsewhere, so it must cut "
    "the text otherwise. FLAP's own [README](https://github.com/CASIA-IVA-Lab/FLAP) has its tables "
    "as pictures only. Its code [calibrates on "
    "WikiText-2](https://github.com/CASIA-LMC-Lab/FLAP/issues/13), on which it is scored here.",
    "Puzzletron's distilled models were trained for 100 iterations on WikiText-103, on which the "
    "one of 69 % overfitted, as its page says. MMLU of that one is of 100 questions a subject.",
    "Not had: the tables of MoDeGPT and PaLU, and perplexities of Minitron and Puzzletron.",
)


def published() -> list[str]:
    """Tables of `PERPLEXITIES` and `ACCURACIES`."""
    return [
        "## Published, of 7 and 8 B parameters",
        "",
        "Perplexity on WikiText-2, as printed by others, not measured here. These models were "
        "trained on a trillion tokens and more. They say of what order a loss at 7 and 8 B is; the "
        "models of the ladder are much smaller.",
        "",
        *_table(PERPLEXITIES),
        "",
        "Accuracy on MMLU in %, likewise; chance is 25 %.",
        "",
        *_table(ACCURACIES),
        "",
        *(f"- {line}" for line in _OTHERS),
    ]


def _table(rows: Sequence[Published]) -> list[str]:
    heads = ["method", "model", "kept", "dense", "compressed", "over dense", "source"]
    return table(heads, [_cells(row) for row in rows])


def _cells(row: Published) -> list[str]:
    numbers = (row.dense, row.compressed)
    over = f"{row.compressed / row.dense:.3f}"
    return [row.method, row.model, row.kept, *(f"{n:.2f}" for n in numbers), over, row.source]

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
_OPTIMIZER = "https://github.com/NVIDIA/Model-Optimizer/blob"
_PUZZLETRON = (
    f"[Model Optimizer]({_OPTIMIZER}/88ff5549bcea33a0b821b4a37a5c5b2940de091f/examples/pruning/"
    "puzzletron/Llama-3.1-8B-Instruct.md)"
)
_EXPERIMENTS = (
    f"[Model Optimizer, experiments]({_OPTIMIZER}/d1169d3581ffaeb3ebc50aa3ba0817e5832f0c59/"
    "examples/pruning/demo/advanced_compression_experiments.md)"
)
_LLAMA = "Llama-3.1-8B-Instruct"
_BLD = "Puzzletron, blocks distilled first (BLD)"
_CHAINED = "Minitron, 32 of 36 layers, then Puzzletron"
_FEWER_LAYERS = "Minitron, 28 of 36 layers"
_WIDTH = "Minitron, width, distilled on 94 B tokens"
_DEPTH = "Minitron, depth, distilled on 94 B tokens"


@dataclass(frozen=True, slots=True)
class Published:
    """A perplexity or an accuracy, dense and compressed, and where it is printed.

    Attributes:
        gsm8k: Of a row of MMLU: the accuracy on GSM8K, too, if it is printed.
    """

    method: str
    model: str
    kept: str
    dense: float
    compressed: float
    source: str
    gsm8k: tuple[float, float] | None = None


def _qwen(method: str, billions: float | None, mmlu: float, gsm8k: float) -> Published:
    """A row of Qwen3-8B at 80 % of the memory, with its parameters if they are printed."""
    kept = "80 % of the memory" + (f", {billions} B parameters" if billions else "")
    return Published(method, "Qwen3-8B", kept, 74.93, mmlu, _EXPERIMENTS, (87.49, gsm8k))


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
    _qwen("Puzzletron", 7.75, 59.10, 57.62),
    _qwen("Puzzletron, distilled on 1.6 M tokens", 7.75, 69.21, 76.12),
    _qwen("Puzzletron, distilled on 1.9 B tokens", 7.75, 71.86, 83.78),
    _qwen(_BLD, None, 72.77, 73.31),
    _qwen(f"{_BLD}, then distilled on 1.6 M tokens", None, 73.41, 80.44),
    _qwen(_FEWER_LAYERS, 6.65, 50.84, 1.14),
    _qwen(f"{_FEWER_LAYERS}, distilled on 1.6 M tokens", 6.65, 73.02, 47.61),
    _qwen(f"{_FEWER_LAYERS}, distilled on 1.9 B tokens", 6.65, 73.94, 74.53),
    _qwen(_CHAINED, 7.42, 66.74, 63.31),
    _qwen(f"{_CHAINED}, distilled on 1.6 M tokens", 7.42, 70.74, 70.81),
    _qwen(f"{_CHAINED}, distilled on 1.9 B tokens", 7.42, 73.32, 84.99),
    Published("Puzzletron", _LLAMA, "about 69 % of the size", 68.39, 66.26, _PUZZLETRON),
    Published("Puzzletron, distilled", _LLAMA, "about 69 % of the size", 68.39, 64.96, _PUZZLETRON),
    Published("Puzzletron", _LLAMA, "50 % of the size", 68.39, 23.16, _PUZZLETRON),
    Published("Puzzletron, distilled", _LLAMA, "50 % of the size", 68.39, 29.60, _PUZZLETRON),
    Published(_WIDTH, "Llama-3.1-8B", "4.5 of 8 B parameters", 65.3, 60.5, _MINITRON, (48.6, 41.2)),
    Published(_DEPTH, "Llama-3.1-8B", "4.5 of 8 B parameters", 65.3, 58.7, _MINITRON, (48.6, 16.8)),
)
# What is known of the others, or that nothing was found.
_OTHERS = (
    "[SVD-LLM's issues](https://github.com/AIoT-MLSys-Lab/SVD-LLM/issues/34) have users who got "
    "14.0 and 14.8 where the paper has 11.82 for LLaMA-3-8B.",
    "MoDeGPT: its [abstract](https://arxiv.org/abs/2408.09632) says that LLaMA-2 and 3 keep 90 to "
    "95 % of their zero-shot performance with 70 to 75 % of the parameters. Its tables were not at "
    "hand.",
    "AA-SVD: its [abstract](https://arxiv.org/abs/2604.02119) says that it is better than other "
    "factorizations at every ratio. Its tables were not at hand. It fits a layer to the output of "
    "the dense model's, on the compressed model's inputs, and then each block; refitting here is "
    "the nearest to it.",
    "CARE, which makes latents of keys and values, has [Llama-3.1-8B](https://github.com/FutureMLS-"
    "Lab/CARE/blob/7f05daa03e988a01970b0fccebb194a32363c0f2/README.md) at a perplexity of 64.8 on "
    "WikiText-2 with latents of 256 (PaLU's decomposition: 2561) and of 72.0 with 128, before any "
    "training. It does not say the dense model's.",
    "Týr-the-Pruner: its [abstract](https://arxiv.org/abs/2503.09657) says that half of "
    "Llama-3.1-70B's parameters keep 97 % of its performance.",
    "PaLU, half the cache, Llama-3-8B-Instruct: mean zero-shot accuracy of 66.2 (joint heads) and "
    "64.5 (groups of four) after 67.9, as table 5 of the paper on X-EcoMLA quotes it.",
    "The survey's dense perplexity of LLaMA-7B is 12.62, and not 5.68 as elsewhere, so it must cut "
    "the text otherwise. FLAP's own [README](https://github.com/CASIA-IVA-Lab/FLAP) has its tables "
    "as pictures only. Its code [calibrates on "
    "WikiText-2](https://github.com/CASIA-LMC-Lab/FLAP/issues/13), on which it is scored here.",
    "Puzzletron's distilled Llamas were trained for 100 iterations on WikiText-103, on which the "
    "one of 69 % overfitted, as its page says. MMLU of that one is of 100 questions a subject. Of "
    "Qwen3-8B, 1.6 M tokens are of WikiText-103, and 1.9 B of Nemotron-Post-Training-Dataset-v2.",
    "Not had: the tables of MoDeGPT, PaLU, AA-SVD and Týr, and perplexities of Minitron and "
    "Puzzletron.",
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
        "Accuracy on MMLU in %, likewise; chance is 25 %. GSM8K tells methods apart that are alike "
        "on MMLU.",
        "",
        *_table(ACCURACIES, "GSM8K, dense", "GSM8K", "over dense"),
        "",
        *(f"- {line}" for line in _OTHERS),
    ]


def _table(rows: Sequence[Published], *of_gsm8k: str) -> list[str]:
    heads = ["method", "model", "kept", "dense", "compressed", "over dense", *of_gsm8k, "source"]
    return table(heads, [_cells(row, len(of_gsm8k)) for row in rows])


def _cells(row: Published, of_gsm8k: int) -> list[str | None]:
    beside = [None] * of_gsm8k if row.gsm8k is None else _numbers(*row.gsm8k)
    numbers = _numbers(row.dense, row.compressed)
    return [row.method, row.model, row.kept, *numbers, *beside, row.source]


def _numbers(dense: float, compressed: float) -> list[str]:
    return [f"{dense:.2f}", f"{compressed:.2f}", f"{compressed / dense:.3f}"]

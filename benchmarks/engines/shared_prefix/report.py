"""The page of the shared prefix."""

from typing import Any

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import origin
from benchmarks.engines.shared_prefix.wave import ADDED, ANSWER

LONGEST = 131_072


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    explained = (
        f"Llama-3-8B's shape with random weights, vLLM's defaults and {LONGEST:,} tokens of "
        "context. One prompt of `prefix` tokens comes first, then `requests` requests at once, "
        f"which repeat it and add {ADDED} tokens. Each is answered with {ANSWER} tokens. "
        "`held MiB` is what PyTorch held in the largest step of the requests beside weights, "
        "cache and CUDA graphs; `left free MiB` what vLLM had left free for a step; `PyTorch MiB` "
        "what PyTorch had taken from the GPU by then, and `in use MiB` what all processes had."
    )
    about = f"{origin(result)}, {result['seconds']} s in all."
    lines = ["# A long prefix that many requests share", "", about, explained, ""]
    return "\n".join([*lines, *table_of_records(result["rows"]), ""])

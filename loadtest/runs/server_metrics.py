"""The server's own numbers of a run: differences of its /metrics.

The metrics are vLLM's (vllm:...) and this project's (gac_...). A server without them gives no
facts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, TypeAdapter, ValidationError

from loadtest.errors import LoadTestError, faults
from loadtest.runs.access import get
from loadtest.runs.target import Target
from vllm_gac.checkpoint.atomic_files import write_json

_FACTS = TypeAdapter(dict[str, Annotated[float, Field(allow_inf_nan=False)]])
Metrics = Mapping[str, float]


def scrape(target: Target) -> dict[str, float]:
    """Every metric of the server, summed over its labels. Empty if the server has none."""
    try:
        status, text = get(target, "/metrics", 10.0)
    except OSError:
        return {}
    return parse(text.decode(errors="replace")) if status == 200 else {}


def parse(text: str) -> dict[str, float]:
    """Parse the Prometheus text format into {name: sum over labels}.

    `vllm:cache_config_info` has its numbers in labels; they become `kv_cache_tokens`.
    """
    metrics: dict[str, float] = {}
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError:
        return {}
    for sample in samples:
        metrics[sample.name] = metrics.get(sample.name, 0.0) + sample.value
        blocks, size = (sample.labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
        if sample.name == "vllm:cache_config_info" and blocks.isdigit() and size.isdigit():
            tokens = metrics.get("kv_cache_tokens", 0.0)
            metrics["kv_cache_tokens"] = tokens + int(blocks) * int(size)
    return metrics


def facts(before: Metrics, after: Metrics) -> dict[str, float]:
    """The numbers that a report shows, from the scrapes before and after a run.

    A number is left out if the server lacks its metric.
    """
    known: dict[str, float] = {}
    for fact, name in (
        ("kv_cache_tokens", "kv_cache_tokens"),
        # Our metric is also exact if layers have caches of different widths.
        ("kv_cache_tokens", "gac_kv_cache_tokens"),
        ("kv_bytes_per_token", "gac_kv_token_bytes"),
    ):
        if name in after:
            known[fact] = after[name]
    if "vllm:num_preemptions_total" in after:
        known["preemptions"] = _grown(before, after, "vllm:num_preemptions_total")
    for fact, top, bottom in (
        ("server_ttft", "vllm:time_to_first_token_seconds_sum", None),
        ("server_itl", "vllm:inter_token_latency_seconds_sum", None),
        ("prefix_hits", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ):
        count = _grown(before, after, bottom or top.replace("_sum", "_count"))
        if count > 0:
            known[fact] = _grown(before, after, top) / count
    return known


def write_facts(known: Mapping[str, float], directory: Path) -> None:
    """Write the facts into the run's directory."""
    write_json(directory / "server.json", dict(known))


def read_facts(directory: Path) -> dict[str, float]:
    """Read the facts of a run. Empty if the run has none."""
    path = directory / "server.json"
    if not path.exists():
        return {}
    try:
        return _FACTS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise LoadTestError(f"{path}: not what a server said: {faults(error)[0]}") from error


def _grown(before: Metrics, after: Metrics, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)

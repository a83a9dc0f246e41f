"""What the dashboard shows: rows of panels, each with its PromQL. `build.py` makes the JSON.

Lines are told apart by model_name, so a model and its compressed form, served under two names,
stand side by side in every panel; replicas of a model are one line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Grafana fills these in. $__rate_interval follows from the scrape interval and the time range.
OF = 'job=~"$job", instance=~"$instance", model_name=~"$model_name"'
MODEL = 'model_name=~"$model_name"'
NOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the name of its lines."""

    expr: str
    legend: str = "{{model_name}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel; `width` of 24. `columns` renames a table's, those without a name are left out."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Literal["lines", "bars", "table"] = "lines"
    width: int = 8
    columns: Mapping[str, str | None] = field(default_factory=dict)


def quantiles(metric: str) -> tuple[Query, ...]:
    """The median and the chosen quantile of a histogram."""
    buckets = f"sum by (model_name, le) (rate({metric}_bucket{{{OF}}}[{NOW}]))"
    return (
        Query(f"histogram_quantile(0.5, {buckets})", "{{model_name}} p50"),
        Query(
            f"histogram_quantile($quantile, {buckets})",
            "{{model_name}} ${quantile:text}",
        ),
    )


def mean(metric: str) -> str:
    """The mean of a histogram's observations."""
    top, bottom = (
        f"sum by (model_name) (rate({metric}_{part}{{{OF}}}[{NOW}]))" for part in ("sum", "count")
    )
    return f"{top} / {bottom}"


def rate(counter: str, by: str = "model_name") -> str:
    """Increase per second."""
    return f"sum by ({by}) (rate({counter}{{{OF}}}[{NOW}]))"


LATENCY = (
    Panel(
        "Time to first token",
        "From the arrival of a request at the server to its first token.",
        "s",
        quantiles("vllm:time_to_first_token_seconds"),
    ),
    Panel(
        "Inter-token latency",
        "Between the tokens of an answer. One value per token, so long answers weigh more.",
        "s",
        quantiles("vllm:inter_token_latency_seconds"),
    ),
    Panel(
        "Time per output token",
        "Decode time of a request by its tokens. One value per request.",
        "s",
        quantiles("vllm:request_time_per_output_token_seconds"),
    ),
    Panel(
        "Whole answer",
        "From the arrival of a request to its last token. Buckets start at 0.3 s.",
        "s",
        quantiles("vllm:e2e_request_latency_seconds"),
    ),
    Panel(
        "Where the time goes",
        "Mean seconds of a request in the queue, in prefill and in decode.",
        "s",
        tuple(
            Query(
                mean(f"vllm:request_{phase}_time_seconds"),
                f"{{{{model_name}}}} {phase}",
            )
            for phase in ("queue", "prefill", "decode")
        ),
    ),
    Panel(
        "Misses of the SLO",
        "Share of first tokens above 1 s, of answers above 50 ms per token, of gaps above 100 ms, "
        "of requests answered with 5xx, over 5 minutes. 1 % is allowed.",
        "percentunit",
        (Query(f"model_name_sli:bad:ratio_rate5m{{{MODEL}}}", "{{model_name}} {{sli}}"),),
    ),
)

THROUGHPUT = (
    Panel(
        "Prompt tokens",
        "Tokens prefilled per second; those found in the prefix cache are counted too.",
        "suffix: tok/s",
        (Query(rate("vllm:prompt_tokens_total")),),
        width=6,
    ),
    Panel(
        "Generated tokens",
        "Tokens decoded per second.",
        "suffix: tok/s",
        (Query(rate("vllm:generation_tokens_total")),),
        width=6,
    ),
    Panel(
        "Requests finished",
        "By reason: stop and length are whole answers, abort is a client that left.",
        "reqps",
        (
            Query(
                rate("vllm:request_success_total", "model_name, finished_reason"),
                "{{model_name}} {{finished_reason}}",
            ),
        ),
        width=6,
    ),
    Panel(
        "Tokens per engine step",
        "Mean over steps: how full the batch is. Small steps are bound by memory bandwidth, where "
        "fewer weight and KV bytes count most.",
        "none",
        (Query(mean("vllm:iteration_tokens_total")),),
        width=6,
    ),
)

KV_CACHE = (
    Panel(
        "KV cache in use",
        "The fullest engine of a model. Near 100 % requests wait or are preempted.",
        "percentunit",
        (Query(f"max by (model_name) (vllm:kv_cache_usage_perc{{{OF}}})"),),
        width=6,
    ),
    Panel(
        "Room for tokens",
        "Tokens that fit in the KV cache, all engines of a model together.",
        "short",
        (Query(f"sum by (model_name) (gac_kv_cache_tokens{{{OF}}})"),),
        width=6,
    ),
    Panel(
        "Free tokens",
        "What of this room is left.",
        "short",
        (Query(f"model_name:kv_cache_free_tokens:sum{{{MODEL}}}"),),
        width=6,
    ),
    Panel(
        "Prefix cache hits",
        "Share of looked-up tokens that were found.",
        "percentunit",
        (
            Query(
                f"{rate('vllm:prefix_cache_hits_total')} / "
                f"{rate('vllm:prefix_cache_queries_total')}"
            ),
        ),
        width=6,
    ),
)

QUEUE = (
    Panel(
        "Requests running",
        "The decode batch, and what is being prefilled.",
        "short",
        (Query(f"sum by (model_name) (vllm:num_requests_running{{{OF}}})"),),
        width=6,
    ),
    Panel(
        "Requests waiting",
        "For capacity, or deferred (KV transfer, LoRA budget).",
        "short",
        (
            Query(
                f"sum by (model_name, reason) (vllm:num_requests_waiting_by_reason{{{OF}}})",
                "{{model_name}} {{reason}}",
            ),
        ),
        width=6,
    ),
    Panel(
        "Preemptions",
        "Requests per second whose KV cache was taken away; they are computed again.",
        "reqps",
        (Query(rate("vllm:num_preemptions_total")),),
        width=6,
    ),
    Panel(
        "Rejected and failed",
        "Requests per second turned away by a queue limit, and answered with 5xx.",
        "reqps",
        (
            Query(
                rate("vllm:admission_rejections_total", "model_name, reason"),
                "{{model_name}} {{reason}}",
            ),
            Query(
                "sum by (instance) (rate(http_requests_total"
                f'{{job=~"$job", instance=~"$instance", status="5xx"}}[{NOW}]))',
                "{{instance}} 5xx",
            ),
        ),
        width=6,
    ),
)

COMPRESSION = (
    Panel(
        "KV bytes per token",
        "What one token takes in the KV cache, compressed and dense.",
        "decbytes",
        (
            Query(f"max by (model_name) (gac_kv_token_bytes{{{OF}}})"),
            Query(
                f"max by (model_name) (gac_dense_kv_token_bytes{{{OF}}})",
                "{{model_name}}, dense",
            ),
        ),
        kind="bars",
        width=5,
    ),
    Panel(
        "Parameters",
        "Weights of the model, compressed and dense.",
        "short",
        (
            Query(f"max by (model_name) (gac_parameters{{{OF}}})"),
            Query(
                f"max by (model_name) (gac_dense_parameters{{{OF}}})",
                "{{model_name}}, dense",
            ),
        ),
        kind="bars",
        width=5,
    ),
    Panel(
        "Aligned dims",
        "Share of head sizes, widths and ranks that are multiples of 8. Others are slow on a GPU.",
        "percentunit",
        (Query(f"min by (model_name) (gac_aligned_dims_ratio{{{OF}}})"),),
        kind="bars",
        width=4,
    ),
    Panel(
        "Attention kernels",
        "Layers by the backend that runs their attention, its decode and prefill kernels, and "
        "their heads: vllm is vLLM's own, GAC this project's, GAC_REFERENCE plain torch.",
        "none",
        (
            Query(
                "max by (model_name, backend, decode, prefill, keys, values) "
                f"(gac_attention_layers{{{OF}}})"
            ),
        ),
        kind="table",
        width=10,
        columns={"Time": None, "Value": "layers"},
    ),
)

ROWS = {
    "Latency": LATENCY,
    "Throughput": THROUGHPUT,
    "KV cache": KV_CACHE,
    "Queue": QUEUE,
    "Compression": COMPRESSION,
}

"""The facts of a run, from two scrapes of a server's metrics."""

from pathlib import Path

import pytest

from loadtest.errors import LoadTestError
from loadtest.runs.server_metrics import facts, parse, read_facts, scrape, write_facts
from loadtest.runs.target import Target

BEFORE = """
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="a b"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0"} 1.0
vllm:time_to_first_token_seconds_count{engine="0"} 10.0
vllm:prefix_cache_queries_total 100
vllm:prefix_cache_hits_total 0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="50",engine="1"} 1.0
gac_kv_token_bytes{model="x"} 1.5e+03
"""
AFTER = (
    BEFORE.replace("} 2.0", "} 5.0")
    .replace("sum{engine=\"0\"} 1.0", "sum{engine=\"0\"} 3.0")
    .replace("} 10.0", "} 20.0")
    .replace("queries_total 100", "queries_total 300")
    .replace("hits_total 0", "hits_total 50")
)  # fmt: skip


def test_counters_are_differences_and_engines_are_added() -> None:
    assert facts(parse(BEFORE), parse(AFTER)) == {
        "kv_cache_tokens": 2400.0,
        "kv_bytes_per_token": 1500.0,
        "preemptions": 3.0,
        "server_ttft": 0.2,
        "prefix_hits": 0.25,
    }


def test_the_exact_room_is_taken_where_it_is_told() -> None:
    told = parse(
        AFTER + 'gac_kv_cache_tokens{engine="0"} 900\ngac_kv_cache_tokens{engine="1"} 800\n'
    )
    assert facts({}, told)["kv_cache_tokens"] == 1700


def test_a_server_without_metrics_gives_no_facts() -> None:
    assert scrape(Target("http://127.0.0.1:9", "m")) == {}
    assert parse("<html>no metrics</html>") == facts({}, {}) == {}


def test_facts_survive_their_file(tmp_path: Path) -> None:
    assert read_facts(tmp_path) == {}
    write_facts({"preemptions": 3.0}, tmp_path)
    assert read_facts(tmp_path) == {"preemptions": 3.0}
    (tmp_path / "server.json").write_text("[1]")
    with pytest.raises(LoadTestError, match=r"server\.json"):
        read_facts(tmp_path)

"""The real Prometheus, with the committed configuration, scrapes a running server.

The server is the compressed demo model behind two API servers, started from the committed
cpu-demo.yaml. After a little traffic every line of the dashboard and every rule has data.
"""

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.client.open_loop import Share, replay
from loadtest.runs.records import Record
from loadtest.runs.target import Target
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario, find_scenario, load_yaml
from tests.serving.server import Server, serve
from tests.serving_configs.programs import CONFIGS, program
from tests.serving_configs.test_prometheus import expressions
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until
from vllm_gac.checkpoint.open import open_checkpoint

pytestmark = pytest.mark.slow

SECONDS = 15  # of traffic
EMPTY = {"Rejected and failed / {{instance}} 5xx"}  # no request was answered with 5xx
# Alerts that a busy machine, shared by server and client, may raise for good reason.
SLOW = {"BudgetBurnsFast", "BudgetBurnsSlowly", "QueueGrows", "QueueStays", "ServerDown"}


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str
    log: Path

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its API."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}{query}", timeout=PATIENCE
        ) as response:
            return json.load(response)["data"]

    def values(self, expression: str) -> list[float]:
        """The value of each series, those that are no number left out."""
        result = self.ask("query", query=expression)["result"]
        numbers = (float(series["value"][1]) for series in result)
        return [number for number in numbers if not math.isnan(number)]

    def wait_for_rules(self) -> None:
        """Wait until every rule has read what every other one says of the data that are here.

        Rules read rules, three deep, and the order of their groups is nobody's: so four rounds,
        each begun when the one before has ended.
        """
        for _ in range(4):
            before = self._evaluated()
            wait_until(
                lambda old=before: not set(old) & set(self._evaluated()), PATIENCE, "all rules"
            )

    def _evaluated(self) -> list[tuple[str, str]]:
        """Each group of rules, and when it was evaluated last."""
        groups = self.ask("rules")["groups"]
        return [(group["name"], group["lastEvaluation"]) for group in groups]


@contextlib.contextmanager
def prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """Prometheus as committed, but scraping and evaluating each second, and this target."""
    shutil.copytree(CONFIGS / "prometheus", directory / "prometheus")
    file = directory / "prometheus" / "prometheus.yml"
    config = yaml.safe_load(re.sub(r"(_interval): \d+s", r"\1: 1s", file.read_text()))
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    file.write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    log = directory / "log"
    command = [program("prometheus"), f"--config.file={file}", f"--web.listen-address={url}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={directory / 'data'}"], stdout=out, stderr=out
        )
    try:
        ready = f"http://{url}/-/ready"
        wait_until(lambda: process.poll() is not None or _answers(ready), PATIENCE, "Prometheus")
        assert process.poll() is None, log.read_text()
        yield Prometheus(f"http://{url}", log)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _answers(url: str) -> bool:
    urllib.request.urlopen(url, timeout=PATIENCE).close()
    return True


@pytest.fixture(scope="module")
def server(compressed_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program("prometheus")  # skip before a server is started for nothing
    log = tmp_path_factory.mktemp("server") / "log"
    config = CONFIGS / "vllm" / "cpu-demo.yaml"
    # Two API servers do not drain (serving_configs/README.md).
    flags = ("--config", str(config), "--api-server-count", "2", "--shutdown-timeout", "0")
    with serve(compressed_demo, log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def watched(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Prometheus, list[Record]]]:
    """Prometheus after it has watched some traffic, and the records of that traffic."""
    schedule = generate(load_yaml(find_scenario("smoke"), Scenario, rate=3, duration=SECONDS))
    records: list[Record] = []
    address = server.url.removeprefix("http://")
    with prometheus(tmp_path_factory.mktemp("prometheus"), address) as running:
        # A scrape before the first request: rates need two.
        wait_until(lambda: running.values("sum(up)") == [1], PATIENCE, "a scrape")
        target = Target(server.url, "demo")
        replay(schedule, target, Share(), time.time(), PATIENCE, records.append)
        # A scrape after the last.
        sent = sum(record.completion_tokens or 0 for record in records)
        wait_until(
            lambda: running.values("vllm:generation_tokens_total") == [sent],
            PATIENCE,
            "the server counts all tokens",
        )
        running.wait_for_rules()
        yield running, records


def test_every_dashboard_query_has_data(watched: tuple[Prometheus, list[Record]]) -> None:
    running, _ = watched
    # An hour back: however long the machine takes, the traffic lies in it.
    without = {line for line, expression in expressions("1h") if not running.values(expression)}
    assert without == EMPTY


def test_every_rule_has_data_and_a_healthy_server_raises_no_alert(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched
    rules = [rule for group in running.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    assert {name for name in recorded if not running.values(name)} == set()
    read = {
        name
        for rule in rules
        for name in re.findall(r"\b(?:vllm:|gac_|http_)[\w:]+", rule["query"])
    }
    assert {name for name in read if not running.values(f"count({name})")} == set()
    assert {alert["labels"]["alertname"] for alert in running.ask("alerts")["alerts"]} <= SLOW
    complaints = [line for line in running.log.read_text().splitlines() if "level=info" not in line]
    assert complaints == []


def test_two_api_servers_count_requests_once(
    watched: tuple[Prometheus, list[Record]], server: Server, compressed_demo: Path
) -> None:
    running, records = watched
    assert server.log.read_text().count("ApiServer_1") > 0, "only one API server ran"
    assert [record.error for record in records] == [None] * len(records)
    prompts = sum(record.prompt_tokens or 0 for record in records)
    assert running.values("vllm:prompt_tokens_total") == [prompts]
    assert sum(running.values("vllm:request_success_total")) == len(records)
    assert running.values('http_requests_total{handler="/v1/completions"}') == [len(records)]

    layout = open_checkpoint(compressed_demo).layout
    assert running.values("gac_kv_token_bytes") == [2 * layout.kv_elements]
    assert running.values("gac_parameters") == [layout.parameters]
    assert sum(running.values("gac_attention_layers")) == len(layout.layers)
    # Whichever of the two answers: the same series, one of each, with the same value.
    scrapes = {
        tuple(sorted(line for line in server.metrics().splitlines() if line.startswith("gac_")))
        for _ in range(10)
    }
    (scrape,) = scrapes
    names = [line.split("}")[0] for line in scrape]
    assert len(set(names)) == len(names) >= 8
    kept = running.ask("label/__name__/values")
    assert not [name for name in kept if re.fullmatch(r".+_created|python_gc_.+", name)]

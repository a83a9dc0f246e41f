"""The real Prometheus, with the committed configuration, scrapes a running server and client.

The server is the compressed demo model behind two API servers, started from the committed
cpu-demo.yaml. After a little traffic every line of the dashboard and every rule has data.
"""

import contextlib
import http.server
import json
import math
import queue
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import BadRequestError

from loadtest.client.live_metrics import LiveMetrics, exported
from loadtest.client.open_loop import Share, replay
from loadtest.runs.health import HealthMonitor
from loadtest.runs.records import Record
from loadtest.runs.target import Target
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import find_scenario, load_scenario
from tests.serving.server import Server, serve
from tests.serving_configs.dashboard import expressions
from tests.serving_configs.debian import CONFIGS, program
from tests.support.local_servers import answering, free_port
from tests.support.waiting import PATIENCE, wait_until
from vllm_gac.checkpoint.open import open_checkpoint

SECONDS = 15  # of traffic
# Lines that rightly stay empty here, and why.
EMPTY = {
    "Rejected and failed / {{instance}} 5xx": "no request was answered with 5xx",
    "Requests of each side / {{model_name}} {{variant}}": "there is no canary",
    "Misses of each side / {{model_name}} {{variant}} {{sli}}": "there is no canary",
    "More misses than dense / {{model_name}} {{variant}} {{sli}}": "there is no canary",
    "Is it chance? / {{model_name}} {{variant}} {{sli}}": "there is no canary",
}
ALWAYS = {"Watchdog", "NoProbe"}  # no blackbox exporter runs here

# Alerts that a busy machine, shared by server and client, may raise for good reason.
SLOW = {
    "BudgetBurnsFast",
    "BudgetBurnsSlowly",
    "LoadTestClientInvalid",
    "QueueGrows",
    "QueueStays",
    "ServerDown",  # a scrape has a second here; pending after one that took longer
}


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
def prometheus(
    directory: Path, targets: dict[str, str], alertmanagers: tuple[str, ...] = ()
) -> Iterator[Prometheus]:
    """Prometheus as committed, but scraping and evaluating each second, and these targets."""
    shutil.copytree(CONFIGS / "prometheus", directory / "prometheus")
    config = directory / "prometheus" / "prometheus.yml"
    config.write_text(re.sub(r"(_interval|_timeout): \d+s", r"\1: 1s", config.read_text()))
    for job, target in targets.items():
        path = directory / "prometheus" / "targets" / f"{job}.yml"
        path.write_text(json.dumps([{"targets": [target]}]))
    named = [{"targets": [address]} for address in alertmanagers]
    (directory / "prometheus" / "targets" / "alertmanager.yml").write_text(json.dumps(named))
    url = f"127.0.0.1:{free_port()}"
    log = directory / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={url}",
                # The first time is before Prometheus has read where to send it.
                "--rules.alert.resend-delay=1s",
            ],
            stdout=out,
            stderr=out,
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
    schedule = generate(load_scenario(find_scenario("smoke"), rate=3, duration=SECONDS))
    monitor = HealthMonitor(0)
    live = LiveMetrics("demo", monitor, 0)
    records: list[Record] = []

    def on_record(record: Record) -> None:
        records.append(record)
        live.add(record)

    with exported(live, 0) as port:
        targets = {"vllm": server.url.removeprefix("http://"), "loadtest": f"127.0.0.1:{port}"}
        with prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
            # A scrape before the first request: rates need two.
            wait_until(lambda: running.values("sum(up)") == [len(targets)], PATIENCE, "targets")
            target = Target(server.url, "demo")
            replay(schedule, target, Share(), time.time(), PATIENCE, on_record)
            # A scrape after the last.
            sent = sum(record.completion_tokens or 0 for record in records)
            wait_until(
                lambda: running.values("vllm:generation_tokens_total") == [sent],
                PATIENCE,
                "the server counts all tokens",
            )
            wait_until(
                lambda: sum(running.values("loadtest_requests_total")) == len(records),
                PATIENCE,
                "the client counts all requests",
            )
            running.wait_for_rules()
            yield running, records
    monitor.stop()


@pytest.mark.slow
def test_both_targets_are_scraped_without_a_complaint(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched

    def health() -> dict[str, str]:
        targets = running.ask("targets")["activeTargets"]
        found = {target["labels"]["job"]: target["health"] for target in targets}
        return {job: found.get(job, "") for job in both_up}

    both_up = {"vllm": "up", "loadtest": "up"}
    wait_until(
        lambda: health() == both_up, PATIENCE, "both are up"
    )  # a scrape has a second, or fails
    assert health() == both_up
    complaints = [line for line in running.log.read_text().splitlines() if "level=info" not in line]
    assert complaints == []


@pytest.mark.slow
def test_every_line_of_the_dashboard_has_data(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched
    # An hour back: however long the machine takes, the traffic lies in it.
    without = {line for line, expression in expressions("1h") if not running.values(expression)}
    assert without == set(EMPTY)


@pytest.mark.slow
def test_every_variable_of_the_dashboard_has_a_choice(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched
    (series,) = {
        (s["job"], s["model_name"])
        for s in running.ask("series", **{"match[]": "vllm:engine_sleep_state"})
    }
    assert series == ("vllm", "demo")


@pytest.mark.slow
def test_every_rule_is_evaluated_and_every_recorded_series_has_data(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched
    rules = [rule for group in running.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 35
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    without = {name for name in recorded if not running.values(name)}
    assert without == {
        f"model_name_sli:bad_share:{what}6h" for what in ("difference_from_dense", "of_both_", "z")
    }


@pytest.mark.slow
def test_what_alerts_read_exists_and_of_a_sound_server_none_is_raised(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched
    alerts = yaml.safe_load((CONFIGS / "prometheus" / "rules" / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    read = {
        name
        for rule in rules
        for name in re.findall(r"\b(?:vllm:|gac_|loadtest_|http_|model_name)[\w:]+", rule["expr"])
    } - {"model_name_sli"}
    read -= {"model_name_sli:bad_share:z6h"}  # of a canary
    assert len(read) > 15
    exists = {name for name in read if running.ask("query", query=f"count({name})")["result"]}
    assert read - exists - {"model_name"} == set()
    raised = {alert["labels"]["alertname"] for alert in running.ask("alerts")["alerts"]}
    assert ALWAYS <= raised <= SLOW | ALWAYS


@pytest.mark.slow
def test_two_api_servers_count_everything_once(
    watched: tuple[Prometheus, list[Record]], server: Server, compressed_demo: Path
) -> None:
    running, records = watched
    assert server.log.read_text().count("ApiServer_1") > 0, "only one API server ran"
    assert [record.error for record in records] == [None] * len(records)
    prompts = sum(record.prompt_tokens or 0 for record in records)
    tokens = sum(record.completion_tokens or 0 for record in records)
    assert running.values("vllm:prompt_tokens_total") == [prompts]
    assert running.values("vllm:generation_tokens_total") == [tokens]
    assert sum(running.values("vllm:request_success_total")) == len(records)
    assert running.values('http_requests_total{handler="/v1/completions"}') == [len(records)]
    assert running.values('loadtest_requests_total{outcome="ok"}') == [len(records)]

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


@pytest.mark.slow
def test_series_that_nobody_asks_for_are_not_kept(
    watched: tuple[Prometheus, list[Record]],
) -> None:
    running, _ = watched
    names = running.ask("label/__name__/values")
    assert not [name for name in names if re.fullmatch(r".+_created|python_gc_.+", name)]


@pytest.mark.slow
def test_one_request_does_not_get_the_whole_queue(server: Server) -> None:
    ask = partial(server.client().completions.create, model="demo", max_tokens=1)
    assert len(ask(prompt=["x"] * 4).choices) == 4  # of 8 that `serve` lets run at a time
    for refused in ({"prompt": ["x"] * 5}, {"prompt": ["x"] * 2, "n": 3}):
        with pytest.raises(BadRequestError, match="one request may have 4: send several requests"):
            ask(**refused)


def test_a_server_that_is_gone_is_noticed(tmp_path: Path) -> None:
    gone = {"vllm": f"127.0.0.1:{free_port()}", "loadtest": f"127.0.0.1:{free_port()}"}
    with prometheus(tmp_path, gone) as running:

        def states() -> dict[str, str]:
            alerts = running.ask("alerts")["alerts"]
            return {alert["labels"]["alertname"]: alert["state"] for alert in alerts}

        wait_until(lambda: "ServerDown" in states(), PATIENCE, "ServerDown")
        assert states().get("ServerDown") == "pending"  # it fires after two minutes


def test_alerts_are_sent(tmp_path: Path) -> None:
    """The Watchdog, which fires always, to what stands in for an Alertmanager.

    Debian's own starts only where it is installed; what it does with alerts is amtool's to say.
    """
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    gone = {job: f"127.0.0.1:{free_port()}" for job in ("vllm", "loadtest")}
    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    with answering(receiver) as address, prometheus(tmp_path, gone, (address,)):
        alerts = sent.get(timeout=PATIENCE)
    (watchdog,) = [alert for alert in alerts if alert["labels"]["alertname"] == "Watchdog"]
    assert watchdog["labels"]["severity"] == "heartbeat"

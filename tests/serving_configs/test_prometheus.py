"""Prometheus takes the configuration, its rules and the queries of the dashboard."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_configs.programs import CONFIGS, program

FILE = CONFIGS / "grafana" / "dashboards" / "vllm-gac.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EVERYTHING = {"$quantile": "0.99", "$job": ".+", "$instance": ".+", "$model_name": ".+"}
PROMETHEUS = CONFIGS / "prometheus"
TESTS = sorted(PROMETHEUS.glob("tests/*.yml"))


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules" / f"{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS, RECORDED = rules("alerts"), rules("recording")
NAMES = {rule["record"] for rule in RECORDED}


def promtool(*arguments: Path | str) -> None:
    command = [program("promtool"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_pass_promtool_tests(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_has_a_promtool_test_and_a_severity() -> None:
    cases = [
        case
        for path in TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test["promql_expr_test"]
    ]
    fired = {
        name
        for case in cases
        if case["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', case["expr"])
    }
    assert fired == {rule["alert"] for rule in ALERTS}
    assert {rule["labels"]["severity"] for rule in ALERTS} == {"page", "ticket"}


def test_recorded_series_are_those_that_queries_use() -> None:
    read = "".join(rule["expr"] for rule in RECORDED + ALERTS)
    read += "".join(expression for _, expression in expressions())
    assert set(re.findall(r"(?:instance:)?model_name(?:_sli)?:[\w:]+", read)) == NAMES


def expressions(interval: str = "1m") -> Iterator[tuple[str, str]]:
    """(panel and line, PromQL as Grafana sends it with everything selected) of every line."""
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in ({"$__rate_interval": interval} | EVERYTHING).items():
                expression = expression.replace(variable, value)
            yield f"{panel['title']} / {target['legendFormat']}", expression


def test_every_query_filters_by_model_name() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            if "http_requests_total" in target["expr"]:
                continue  # the front end's own counters do not know the model
            assert 'model_name=~"$model_name"' in target["expr"], panel["title"]
            assert "{{model_name}}" in target["legendFormat"], panel["title"]
            ranges = re.findall(r"\[(.*?)\]", target["expr"])
            assert set(ranges) <= {"$__rate_interval"}, panel["title"]

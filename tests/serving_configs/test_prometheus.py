"""Prometheus takes the configuration, and each rule does what its promtool test says."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_configs.programs import CONFIGS, program
from tests.serving_configs.test_dashboard import expressions

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


def test_prometheus_takes_the_configuration_with_all_rules() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_promtool_tests(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_fires_in_a_promtool_test_and_says_who_must_look() -> None:
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


def test_recorded_series_are_read_and_those_that_are_read_are_recorded() -> None:
    read = "".join(rule["expr"] for rule in RECORDED + ALERTS)
    read += "".join(expression for _, expression in expressions())
    assert set(re.findall(r"(?:instance:)?model_name(?:_sli)?:[\w:]+", read)) == NAMES

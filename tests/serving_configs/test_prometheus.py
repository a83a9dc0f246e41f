"""Prometheus takes the configuration, and each rule does what its promtool test says."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.runs.verdict import Limits
from tests.serving_configs.debian import CONFIGS, program

PROMETHEUS = CONFIGS / "prometheus"
RULES = {path.stem: yaml.safe_load(path.read_text()) for path in PROMETHEUS.glob("rules/*.yml")}
ALERTS: list[dict[str, Any]] = [
    rule for group in RULES["alerts"]["groups"] for rule in group["rules"]
]
RECORDED: list[dict[str, Any]] = [
    rule for group in RULES["recording"]["groups"] for rule in group["rules"]
]


def promtool(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=60
    )


def test_prometheus_takes_the_configuration_with_all_rules() -> None:
    check = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert check.returncode == 0, check.stdout + check.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in check.stdout
    assert f"SUCCESS: {len(RECORDED)} rules found" in check.stdout


@pytest.mark.parametrize("name", ["recording", "alerts"])
def test_the_rules_pass_their_promtool_tests(name: str) -> None:
    run = promtool("test", "rules", PROMETHEUS / "tests" / f"{name}.yml")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("change", ["> 14.4 * 0.01", "> 0.95"])
def test_the_promtool_tests_notice_a_changed_limit(change: str, tmp_path: Path) -> None:
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    alerts = tmp_path / "prometheus" / "rules" / "alerts.yml"
    text = alerts.read_text()
    assert change in text
    alerts.write_text(text.replace(change, change.replace("> ", "> 1000 * ")))
    run = promtool("test", "rules", tmp_path / "prometheus" / "tests" / "alerts.yml")
    assert run.returncode != 0


def test_every_alert_is_tested_and_every_recorded_series_is() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts.yml").read_text())["tests"]
    fired = {
        (case["alertname"], alert["exp_labels"].get("reason", ""))
        for test in tests
        for case in test["alert_rule_test"]
        for alert in case["exp_alerts"]
    }
    reasons = {(rule["alert"], rule["labels"].get("reason", "")) for rule in ALERTS}
    fired = {(name, reason if (name, reason) in reasons else "") for name, reason in fired}
    assert fired == reasons
    recorded = (PROMETHEUS / "tests" / "recording.yml").read_text()
    assert {rule["record"] for rule in RECORDED} <= set(re.findall(r"[a-z_]+:[\w:]+", recorded))


def test_alerts_say_who_must_look_and_what_is_wrong() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]


def test_what_a_rule_reads_of_other_rules_is_recorded() -> None:
    names = {rule["record"] for rule in RECORDED}
    for rule in ALERTS:
        read = set(re.findall(r"model_name(?:_sli)?:[\w:]+", rule["expr"]))
        assert read <= names, rule["alert"]


def test_the_load_test_is_judged_by_the_limits_of_its_verdict() -> None:
    limits = Limits()
    lag, wake, cpu = (
        " ".join(rule["expr"].split())
        for rule in ALERTS
        if rule["alert"] == "LoadTestClientInvalid"
    )
    assert f"> {limits.lag:.3f} and" in lag
    assert f"> {limits.lag_of_ttft:g} * " in lag
    assert f"> {limits.wake:.3f} and" in wake
    assert f"> {limits.wake_of_itl:g} * " in wake
    assert cpu.endswith(f"> {limits.cpu:.2f}")

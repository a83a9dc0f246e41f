"""Prometheus takes the configuration, and each rule does what its promtool test says."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml

from loadtest.runs.verdict import Limits
from tests.serving_configs.dashboard import expressions
from tests.serving_configs.debian import CONFIGS, program

PROMETHEUS = CONFIGS / "prometheus"
RULES = {path.stem: yaml.safe_load(path.read_text()) for path in PROMETHEUS.glob("rules/*.yml")}
ALERTS: list[dict[str, Any]] = [
    rule for group in RULES["alerts"]["groups"] for rule in group["rules"]
]
RECORDED: list[dict[str, Any]] = [
    rule
    for file in ("recording", "canary")
    for group in RULES[file]["groups"]
    for rule in group["rules"]
]
RULE_TESTS = {path.stem: path for path in PROMETHEUS.glob("tests/*.yml")}


def promtool(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=600
    )


def test_prometheus_takes_the_configuration_with_all_rules() -> None:
    check = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert check.returncode == 0, check.stdout + check.stderr
    assert f"SUCCESS: {len(ALERTS)} rules found" in check.stdout
    found = re.findall(r"SUCCESS: (\d+) rules found", check.stdout)
    assert sum(map(int, found)) == len(ALERTS) + len(RECORDED)


@pytest.mark.parametrize("name", RULE_TESTS)
def test_the_rules_pass_their_promtool_tests(name: str) -> None:
    run = promtool("test", "rules", RULE_TESTS[name])
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "change", "to", "noticed_by"),
    [
        ("alerts", "> 14.4 * 0.01", "> 1000 * 0.01", "alerts"),
        ("alerts", "> 0.95", "> 950", "alerts"),
        # As they were when these faults went unseen.
        (
            "alerts",
            "min_over_time(vllm:num_requests_running[2m]) > 0\n"
            "            and increase(vllm:generation_tokens_total[2m]) == 0\n"
            "            and increase(vllm:prompt_tokens_total[2m]) == 0",
            "min_over_time(sum without (instance) (vllm:num_requests_running)[2m:1m]) > 0 and "
            "sum without (instance) (increase(vllm:generation_tokens_total[2m])) == 0 and "
            "sum without (instance) (increase(vllm:prompt_tokens_total[2m])) == 0",
            "blind_spots",
        ),
        ("alerts", "running[2m]) > 0", "running[2m]) >= 0", "alerts"),
        ("alerts", "and increase(vllm:prompt_tokens_total[2m]) == 0", "", "alerts"),
        ("alerts", "generation_tokens_total[2m]", "generation_tokens_total[5m]", "alerts"),
        ("alerts", "unless changes(vllm:kv_cache_usage_perc[2m]) > 0", "", "alerts"),
        (
            "alerts",
            "unless on (instance) changes(vllm:kv_cache_usage_perc[1m]) > 0",
            "",
            "blind_spots",
        ),
        (
            "alerts",
            "min_over_time(model_name:requests_waiting:sum[10m]) > 5",
            "deriv(model_name:requests_waiting:sum[10m]) > 0",
            "blind_spots",
        ),
        (
            "alerts",
            "changes(process_start_time_seconds",
            "resets(process_start_time_seconds",
            "blind_spots",
        ),
        (
            "alerts",
            "max by (namespace, job, instance) (resets",
            "sum by (namespace, job, instance) (resets",
            "blind_spots",
        ),
        (
            "alerts",
            'expr: probe_success{job="probe"} == 0 and on (instance) up{job="vllm"} == 1',
            'expr: probe_success{job="probe"} == 0',
            "blind_spots",
        ),
        (
            "alerts",
            "and on (instance) sum by (instance) (increase(vllm:generation_tokens_total[1m])) == 0",
            "",
            "blind_spots",
        ),
        (
            "alerts",
            "and on (instance) sum by (instance) (increase(vllm:prompt_tokens_total[1m])) == 0",
            "",
            "blind_spots",
        ),
        ("recording", 'status="5xx"', 'status="none"', "blind_spots"),
        ("recording", "model_name, variant)", "model_name)", "recording"),
        ("canary", "sqrt(", "(", "canary"),
    ],
)
def test_the_promtool_tests_notice_a_change(
    rules: str, change: str, to: str, noticed_by: str, tmp_path: Path
) -> None:
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    file = tmp_path / "prometheus" / "rules" / f"{rules}.yml"
    text = file.read_text()
    assert change in text
    file.write_text(text.replace(change, to))
    run = promtool("test", "rules", tmp_path / "prometheus" / "tests" / f"{noticed_by}.yml")
    assert run.returncode != 0
    assert "FAILED" in run.stdout + run.stderr


def test_every_alert_is_tested_and_every_recorded_series_is() -> None:
    fired = {
        (case["alertname"], alert["exp_labels"].get("reason", ""))
        for path in RULE_TESTS.values()
        for test in yaml.safe_load(path.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
        for alert in case["exp_alerts"]
    }
    reasons = {(rule["alert"], rule["labels"].get("reason", "")) for rule in ALERTS}
    fired = {(name, reason if (name, reason) in reasons else "") for name, reason in fired}
    assert fired == reasons
    # In a test, or in a rule whose result is in one.
    read = "".join(path.read_text() for path in RULE_TESTS.values())
    read += "".join(rule["expr"] for rule in RECORDED + ALERTS)
    assert {rule["record"] for rule in RECORDED} <= set(re.findall(r"[a-z_]+:[\w:]+", read))


def test_every_recorded_series_is_read_by_an_alert_a_panel_or_another_rule() -> None:
    read = "".join(rule["expr"] for rule in RECORDED + ALERTS)
    read += "".join(expression for _, expression in expressions())
    assert {rule["record"] for rule in RECORDED} <= set(re.findall(r"[a-z_]+:[\w:]+", read))


def test_alerts_say_who_must_look_and_what_is_wrong() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket", "heartbeat"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]


def test_what_a_rule_reads_of_other_rules_is_recorded() -> None:
    names = {rule["record"] for rule in RECORDED}
    for rule in ALERTS:
        read = set(re.findall(r"model_name(?:_sli)?:[\w:]+", rule["expr"]))
        assert read <= names, rule["alert"]


def test_rules_keep_apart_what_answers_for_one_name() -> None:
    """Who sums servers into a model sums over one variant in one namespace, and nothing else."""
    for rule in RECORDED + ALERTS:
        if "loadtest_" in rule["expr"]:
            continue  # of one client, which knows one server
        for by in re.findall(r"\b(?:by|on) \(([^)]*model_name[^)]*)\)", rule["expr"]):
            labels = set(by.split(", "))
            if "instance" in labels:
                continue  # one server, which has one variant
            assert {"namespace", "job"} <= labels, rule
            assert "variant" in labels or "sli" in labels, rule  # `sli`: one variant with another


def test_z_says_as_often_as_it_claims_that_a_canary_is_worse() -> None:
    """Of 20,000 canaries without a difference; with one, it is found."""
    random = numpy.random.default_rng(1)
    n1, n0 = 400, 3600

    def z(canary: float, dense: float) -> Any:
        b1, b0 = random.binomial(n1, canary, 20_000), random.binomial(n0, dense, 20_000)
        p = (b1 + b0) / (n1 + n0)
        return (b1 / n1 - b0 / n0) / numpy.sqrt(p * (1 - p) * (1 / n1 + 1 / n0))

    same = z(0.05, 0.05)
    assert 0.94 < numpy.mean(abs(same) < 2) < 0.965  # the rules say 95 %
    assert numpy.mean(same > 3) < 0.005  # the alert says so
    assert numpy.mean(z(0.10, 0.05) > 3) > 0.75


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
    assert f"> on (model_name) group_left () {limits.wake_of_itl:g} * " in wake
    assert cpu.endswith(f"> {limits.cpu:.2f}")

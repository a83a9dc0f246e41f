"""The committed dashboard is what its script builds, and sound."""

import json
import re
import subprocess
import sys
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


def expressions(interval: str = "1m") -> Iterator[tuple[str, str]]:
    """(panel and line, PromQL as Grafana sends it with everything selected) of every line."""
    for panel in PANELS:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in ({"$__rate_interval": interval} | EVERYTHING).items():
                expression = expression.replace(variable, value)
            yield f"{panel['title']} / {target['legendFormat']}", expression


def test_the_committed_dashboard_is_the_built_one(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    built = tmp_path / "built.json"
    script = CONFIGS / "grafana" / "build.py"
    subprocess.run([sys.executable, script, built], check=True, timeout=600)
    assert built.read_text() == FILE.read_text(), f"run {sys.executable} {script}"


def test_every_expression_is_promql(tmp_path: Path) -> None:
    rules = [{"record": f"line:{n}", "expr": text} for n, (_, text) in enumerate(expressions())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check = subprocess.run([program("promtool"), "check", "rules", path], capture_output=True)
    assert check.returncode == 0, check.stderr


def test_every_query_can_be_narrowed_to_a_model_and_names_it() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            if "http_requests_total" in target["expr"]:
                continue  # the front end's own counters do not know the model
            assert 'model_name=~"$model_name"' in target["expr"], panel["title"]
            assert "{{model_name}}" in target["legendFormat"], panel["title"]
            ranges = re.findall(r"\[(.*?)\]", target["expr"])
            assert set(ranges) <= {"$__rate_interval"}, panel["title"]

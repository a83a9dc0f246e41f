"""The committed dashboard, and its expressions with Grafana's variables filled in."""

import json
from collections.abc import Iterator
from typing import Any

from tests.serving_configs.debian import CONFIGS

FILE = CONFIGS / "grafana" / "dashboards" / "vllm-gac.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES: list[dict[str, Any]] = BOARD["templating"]["list"]


def filled_in(expression: str, interval: str = "1m") -> str:
    """`expression` as Grafana sends it with everything selected."""
    for variable, value in (
        ("$__rate_interval", interval),
        ("$quantile", "0.99"),
        ("$job", ".+"),
        ("$instance", ".+"),
        ("$model_name", ".+"),
    ):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


def expressions(interval: str = "1m") -> Iterator[tuple[str, str]]:
    """(panel and line, PromQL) of every line of every panel."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield (
                f"{panel['title']} / {target['legendFormat']}",
                filled_in(target["expr"], interval),
            )

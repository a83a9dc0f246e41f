"""Prints ../prometheus/rules and the dashboard as what the Prometheus operator and Grafana's
sidecar read in a cluster.

    python serving_configs/k8s/monitoring.py | kubectl apply -n monitoring -f -
"""

import sys
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[1]


def manifests() -> list[dict[str, Any]]:
    """A PrometheusRule of all rule files, and a ConfigMap with the dashboard."""
    files = sorted((CONFIGS / "prometheus" / "rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    dashboard = CONFIGS / "grafana" / "dashboards" / "vllm-gac.json"
    return [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "vllm-gac"},
            "spec": {"groups": groups},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "vllm-gac-dashboard", "labels": {"grafana_dashboard": "1"}},
            "data": {dashboard.name: dashboard.read_text()},
        },
    ]


if __name__ == "__main__":
    yaml.safe_dump_all(manifests(), sys.stdout, sort_keys=False)

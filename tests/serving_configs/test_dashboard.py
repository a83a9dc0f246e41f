"""The committed dashboard is what its script builds, and sound."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.serving_configs.dashboard import BOARD, FILE, PANELS, VARIABLES, expressions
from tests.serving_configs.debian import CONFIGS, program


def test_the_committed_dashboard_is_the_built_one(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs the extra `grafana`")
    built = tmp_path / "built.json"
    script = CONFIGS / "grafana" / "build.py"
    subprocess.run([sys.executable, script, built], check=True, timeout=600)
    assert built.read_text() == FILE.read_text(), f"run {sys.executable} {script}"


def test_every_expression_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"line:{number}", "expr": expression}
        for number, (_, expression) in enumerate(expressions())
    ]
    assert len(rules) > 30
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check = subprocess.run([program("promtool"), "check", "rules", path], capture_output=True)
    assert check.returncode == 0, check.stderr


def test_every_panel_has_a_title_a_description_a_unit_and_the_chosen_data_source() -> None:
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${datasource}" for source in sources), panel["title"]


def test_ids_differ_and_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells


def test_rates_follow_the_scrape_interval() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            ranges = re.findall(r"\[(.*?)\]", target["expr"])
            assert set(ranges) <= {"$__rate_interval"}, panel["title"]


def test_every_query_can_be_narrowed_to_a_model() -> None:
    assert [variable["name"] for variable in VARIABLES] == [
        "datasource",
        "job",
        "instance",
        "model_name",
        "quantile",
    ]
    for panel in PANELS:
        for target in panel["targets"]:
            by_model = 'model_name=~"$model_name"' in target["expr"]
            # The front end's own counters do not know the model.
            assert by_model or "http_requests_total" in target["expr"], panel["title"]


def test_lines_of_models_are_told_apart() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            client = "loadtest_" in target["expr"]  # knows one server, by its name
            told_apart = "{{model_name}}" if client else "{{model_name}} {{variant}}"
            assert told_apart in target["legendFormat"] or (
                "http_requests_total" in target["expr"]
            ), panel["title"]
            sums = re.findall(r"\bby \((model_name.*?)\)", target["expr"])
            assert client or all("variant" in by for by in sums), panel["title"]


def test_what_it_reads_of_recording_rules_is_recorded() -> None:
    names = {
        rule["record"]
        for file in ("recording", "canary")
        for group in yaml.safe_load((CONFIGS / "prometheus" / "rules" / f"{file}.yml").read_text())[
            "groups"
        ]
        for rule in group["rules"]
    }
    for line, expression in expressions():
        assert set(re.findall(r"model_name(?:_sli)?:[\w:]+", expression)) <= names, line

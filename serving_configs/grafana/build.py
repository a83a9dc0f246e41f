"""Builds dashboards/vllm-gac.json from panels.py.

make install-grafana && .venv/bin/python serving_configs/grafana/build.py [OUT.json]
"""

import itertools
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import bargauge, dashboard, prometheus, table, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from panels import ROWS, Panel

OUT = Path(__file__).parent / "dashboards" / "vllm-gac.json"
PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Every vLLM server has it from its start, before any request.
SERVERS = "vllm:engine_sleep_state"
QUANTILES = {"p90": "0.9", "p95": "0.95", "p99": "0.99"}


def board() -> dashboard.Dashboard:
    """The dashboard, of every row."""
    built = (
        dashboard.Dashboard("vLLM, models side by side")
        .uid("vllm-gac")
        .description("Latency, throughput and KV room of models on vLLM, compressed and dense.")
        .tags(["vllm", "gac"])
        .time("now-30m", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .variables([_datasource(), *_selectors(), _quantile()])
        .link(
            dashboard.DashboardLink("vLLM")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["vllm"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    number = itertools.count(1)
    for row, panels in ROWS.items():
        built = built.with_row(dashboard.Row(row).id(next(number)))
        for panel in panels:
            built = built.with_panel(_panel(panel).id(next(number)))
    return built


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _selectors() -> list[dashboard.QueryVariable]:
    """job, instance and model_name, each among what those before it leave."""
    within, variables = "", []
    for name in ("job", "instance", "model_name"):
        variables.append(
            dashboard.QueryVariable(name)
            .label(name.replace("_name", ""))
            .datasource(PROMETHEUS)
            .query(f"label_values({SERVERS}{{{within}}}, {name})")
            .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".+")
        )
        within += f'{", " if within else ""}{name}=~"${name}"'
    return variables


def _quantile() -> dashboard.CustomVariable:
    return (
        dashboard.CustomVariable("quantile")
        .label("Quantile")
        .values(", ".join(f"{text} : {value}" for text, value in QUANTILES.items()))
        .options(
            [VariableOption(text=t, value=v, selected=t == "p99") for t, v in QUANTILES.items()]
        )
        .current(VariableOption(text="p99", value="0.99", selected=True))
    )


def _panel(panel: Panel) -> timeseries.Panel | bargauge.Panel | table.Panel:
    built = {"lines": _lines, "bars": _bars, "table": _table}[panel.kind](panel)
    built = (
        built.title(panel.title)
        .description(panel.description)
        .datasource(PROMETHEUS)
        .unit(panel.unit)
        .span(panel.width)
        .height(8)
        .min(0)
    )
    for index, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .ref_id("ABCDEFGH"[index])
            .datasource(PROMETHEUS)
            .expr(query.expr)
            .legend_format(query.legend)
        )
        target = target.range() if panel.kind == "lines" else target.instant()
        if panel.kind == "table":
            target = target.format(PromQueryFormat.TABLE)
        built = built.with_target(target)
    return built


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    return timeseries.Panel().legend(legend).fill_opacity(5).span_nulls(False)


def _bars(panel: Panel) -> bargauge.Panel:
    last = ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return bargauge.Panel().reduce_options(last).orientation(VizOrientation.HORIZONTAL)


def _table(panel: Panel) -> table.Panel:
    organized = {
        "excludeByName": {old: True for old, new in panel.columns.items() if new is None},
        "renameByName": {old: new for old, new in panel.columns.items() if new is not None},
    }
    return table.Panel().with_transformation(
        DataTransformerConfig(id_val="organize", options=organized)
    )


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    text = JSONEncoder(sort_keys=True, indent=2).encode(board().build())
    out.write_text(text + "\n", encoding="utf-8")

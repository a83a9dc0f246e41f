"""`make loadtest-smoke` with fewer servers and less traffic: real servers, one report."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

import loadtest
from tests.loadtest.locusts import ROOT
from vllm_gac import demo
from vllm_gac.layout.dims import layout_of

pytest.importorskip("matplotlib")

from loadtest.ab.ab import run_comparison
from loadtest.ab.comparison_file import load_comparison
from loadtest.runs.run import load_run
from tests.support.local_servers import free_port

SMOKE = Path(loadtest.__file__).parent / "comparisons" / "smoke.yaml"


@pytest.mark.slow
@pytest.mark.needs("locust")
@pytest.mark.needs("vllm")
def test_the_smoke_comparison_runs_and_says_how_much_room_each_server_has(
    compressed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)
    text = SMOKE.read_text()
    assert "build/demo-gac" in text
    text = text.replace("build/demo-gac", str(compressed_demo))
    # What is nice does not start where others are busy, and here latencies do not count.
    comparison = yaml.safe_load(text.replace("nice -n 10 ", ""))
    servers = [s for s in comparison["servers"] if s["label"] in ("dense", "gac")]
    comparison["traffic"][0] |= {"rates": [1], "duration": 8}
    path, out = tmp_path / "smoke.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(comparison | {"servers": servers, "port": free_port()}))
    report = run_comparison(load_comparison(path), out)
    content = json.loads(report.with_suffix(".json").read_text())
    # On a slow machine some answers have not ended with the run, and a cache may be full.
    for run in content["runs"]:
        errors = {record.error for record in load_run(out / "runs" / run["directory"]).records}
        assert None in errors
        assert errors <= {None, "unfinished when the run ended"}
    # The same memory; what compression saved of it is room.
    room = {run["label"]: run["server"]["kv_cache_tokens"] for run in content["runs"]}
    dense, gac = (
        layout_of(json.loads((model / "config.json").read_text())).kv_elements
        for model in (demo.MODEL, compressed_demo)
    )
    assert room["gac"] / room["dense"] == pytest.approx(dense / gac, rel=0.02)
    # No repeat and no step finds its prompts in the prefix cache, but for the scenario's prefixes.
    assert all(run["server"].get("prefix_hits", 0) < 0.3 for run in content["runs"])

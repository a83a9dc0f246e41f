"""`make loadtest-smoke` end to end: three real servers, their numbers and one report."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

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
@pytest.mark.timeout(3600)
def test_the_smoke_comparison_runs_and_says_how_much_room_each_server_has(
    compressed_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)
    misaligned = tmp_path / "demo-misaligned"
    compress = [programs / "vllm-gac", "compress", demo.MODEL, "--out", misaligned]
    ratios = ["--param-ratio", "0.85", "--kv-ratio", "0.75", "--align", "none"]
    subprocess.run([*compress, *ratios, "--max-tokens", "8192"], check=True)
    text = SMOKE.read_text()
    for made, here in (("demo-gac", compressed_demo), ("demo-misaligned", misaligned)):
        assert f"build/{made}" in text
        text = text.replace(f"build/{made}", str(here))
    path = tmp_path / "smoke.yaml"
    path.write_text(text + f"port: {free_port()}\n")
    out = tmp_path / "out"
    report = run_comparison(load_comparison(path), out)
    content = json.loads(report.with_suffix(".json").read_text())
    # At each of two rates, and once more where the machine was busy.
    runs = [run["label"] for run in content["runs"] if "again" not in run["directory"]]
    assert Counter(runs) == dict.fromkeys(("dense", "misaligned", "gac"), 2)
    # On a slow machine some answers have not ended with the run, and a cache may be full.
    for run in content["runs"]:
        errors = {record.error for record in load_run(out / "runs" / run["directory"]).records}
        assert None in errors
        assert errors <= {None, "unfinished when the run ended"}
    room = {run["label"]: run["server"]["kv_cache_tokens"] for run in content["runs"]}
    per_token = {
        name: layout_of(json.loads((directory / "config.json").read_text())).kv_elements
        for name, directory in (("dense", demo.MODEL), ("gac", compressed_demo))
    }
    # The same memory; what compression saved of it is room.
    assert room["gac"] / room["dense"] == pytest.approx(
        per_token["dense"] / per_token["gac"], rel=0.02
    )
    # No repeat and no step finds its prompts in the prefix cache, but for the scenario's prefixes.
    assert all(run["server"].get("prefix_hits", 0) < 0.3 for run in content["runs"])

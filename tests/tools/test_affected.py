"""Which slow tests run after a change."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.affected import ALWAYS, affected, always, everything_below
from tests.support.imports import ROOT, modules

SLOW = [
    name
    for name, path in modules("tests").items()
    if "mark.slow" in path.read_text() and path.name.startswith("test_")
]


def test_a_test_of_a_server_depends_on_all_that_serves() -> None:
    serving = {name for name in modules("vllm_gac") if name.startswith("vllm_gac.serving")}
    for test in ("test_families", "test_lora", "test_robustness", "test_parallel"):
        assert serving <= everything_below(f"tests.serving.{test}"), test


@pytest.mark.parametrize("test", SLOW)
def test_every_slow_test_depends_on_what_it_tests(test: str) -> None:
    ours = ("vllm_gac.", "loadtest.", "benchmarks.", "tools.")
    beside = "serving_configs" in test or test == "tests.test_notebook"
    assert beside or any(name.startswith(ours) for name in everything_below(test))


@pytest.mark.parametrize(
    ("file", "runs", "does_not_run"),
    [
        ("loadtest/report/conclusion.py", "loadtest/test_smoke.py", "serving/test_lora.py"),
        ("loadtest/comparisons/smoke.yaml", "loadtest/test_smoke.py", "serving/test_lora.py"),
        ("vllm_gac/steps/heal.py", "steps/test_heal_together.py", "kernels/test_compiler.py"),
        ("vllm_gac/cli/compress.py", "demo/test_plan.py", "serving/test_parallel.py"),
        ("vllm_gac/serving/model/llama.py", "serving/test_parallel.py", "demo/test_training.py"),
        ("vllm_gac/serving/metrics.py", "serving/test_lora.py", "kernels/test_swiglu.py"),
        ("vllm_gac/demo/plan.json", "demo/test_plan.py", "kernels/test_compiler.py"),
        ("vllm_gac/gpu/profiles/h200.json", "serving/test_align.py", "kernels/test_swiglu.py"),
        ("serving_configs/nginx/a.conf", "serving_configs/test_ray.py", "demo/test_plan.py"),
        ("tests/support/killing.py", "steps/test_killed_and_full.py", "serving/test_lora.py"),
        ("tests/loadtest/conftest.py", "loadtest/test_report.py", "serving/test_lora.py"),
        ("docs/compress_and_serve.ipynb", "test_notebook.py", "serving/test_lora.py"),
    ],
)  # fmt: skip
def test_a_change_runs_the_tests_that_it_can_break(file: str, runs: str, does_not_run: str) -> None:
    found = affected([file])
    assert f"tests/{runs}" in found
    assert f"tests/{does_not_run}" not in found


@pytest.mark.parametrize(
    "file", ["README.md", "docs/cache.svg", "benchmarks/results/a.json", ".ci/all-passed"]
)
def test_pages_run_no_slow_test(file: str) -> None:
    assert affected([file]) == set()


@pytest.mark.parametrize(
    "file",
    ["pyproject.toml", "requirements/cpu.txt", "tests/conftest.py", ".ci/run", "x/y"],
)
def test_what_everything_rests_on_runs_all(file: str) -> None:
    assert {f"{name.replace('.', '/')}.py" for name in SLOW} <= affected([file])


@pytest.mark.parametrize("name", ALWAYS.values(), ids=list(ALWAYS))
def test_what_always_runs_exists_and_is_slow(name: str) -> None:
    file, _, test = name.partition("::")
    text = (ROOT / file).read_text()
    functions = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    assert "mark.slow" in text
    if test:
        function = functions[test.partition("[")[0]]
        marks = [ast.unparse(mark) for mark in function.decorator_list]
        assert "pytest.mark.slow" in marks or "pytestmark = pytest.mark.slow" in text


def test_names_of_tests_that_always_run() -> None:
    file = ALWAYS["nginx with Prometheus"]
    assert always(f"{file}::test_any[case]")
    assert always(ALWAYS["tensor parallelism"])
    assert not always(f"{ALWAYS['tensor parallelism']}_but_another")
    assert not always(f"{Path(file).parent}/test_ray.py::test_any")


def test_slow_tests_that_begin_too_late_are_left_out_and_named() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "slow", "--slow-minutes", "0"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/test_notebook.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "LEFT OUT: 1 slow tests" in run.stdout
    assert "runs them: tests/test_notebook.py" in run.stdout

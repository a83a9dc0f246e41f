"""Which code this is, so that `--resume` and records notice when it changes."""

import functools
import hashlib
import subprocess
from importlib import metadata
from pathlib import Path

NEXT = "0.2.0.dev0"  # the release that the commits lead to; `fallback_version` in pyproject.toml


@functools.cache
def version() -> str:
    """The version of an installed release, or `NEXT` with the commit or a digest of the sources.

    A checkout has the commit, and the digest too if files of the package differ from it. The
    metadata of an editable install would name the commit at which it was installed.
    """
    package = Path(__file__).parent
    is_source_tree = (package.parent / "pyproject.toml").is_file()
    installed = None if is_source_tree else _installed(package)
    if installed not in (None, NEXT):
        return installed
    return f"{NEXT}+{_commit(package) or _digest(package)}"


def _installed(package: Path) -> str | None:
    """The version of the distribution that this package belongs to; None if there is none."""
    try:
        distribution = metadata.distribution("vllm-gac")
    except metadata.PackageNotFoundError:
        return None
    return (
        distribution.version
        if Path(str(distribution.locate_file(package.name))) == package
        else None
    )


def _commit(package: Path) -> str | None:
    """The commit of a checkout, with a digest if its files were changed; None without git."""
    git = ["git", "--no-optional-locks", "-C", str(package.parent)]
    if not (package.parent / ".git").exists():
        return None
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True)
        diff = [*git, "diff", "--quiet", "HEAD", "--", package.name]
        changed = subprocess.run(diff, capture_output=True).returncode
    except OSError:
        return None
    if head.returncode != 0:
        return None
    return f"g{head.stdout.decode().strip()}" + (f".{_digest(package)}" if changed else "")


def _digest(package: Path) -> str:
    """Of the names and contents of the package's code and GPU profiles."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"d{digest.hexdigest()[:12]}"

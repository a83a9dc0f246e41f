"""A Hugging Face Hub on this machine: the endpoints that huggingface_hub and vLLM use to download.

Repositories are dictionaries of files by revision. Every request is kept, so that tests can tell
what was asked for and with which token.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.local_servers import answering

Files = Mapping[str, bytes]
_PATHS = re.compile(r"/(?:api/(models|datasets)/|(datasets)/|)([^/]+/[^/]+)/(\w[\w-]*)(?:/(.*))?")


@dataclass
class Repository:
    """Files by branch or tag; and a token, without which they are gated."""

    revisions: Mapping[str, Files]
    token: str | None = None

    def commit(self, revision: str) -> str | None:
        """The commit of a branch, a tag or a commit; None if there is none."""
        commits = {name: _commit(files) for name, files in self.revisions.items()}
        return commits.get(revision) or (revision if revision in commits.values() else None)

    def files(self, revision: str) -> Files:
        """The files at a branch, a tag or a commit."""
        commit = self.commit(revision)
        return next(files for files in self.revisions.values() if _commit(files) == commit)


@dataclass
class Hub:
    """A Hub that listens at `url`; `asked` are the requests, as "METHOD path"."""

    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """What to set so that huggingface_hub asks this Hub, with its cache below `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        } | more


@contextmanager
def running(**models: Repository) -> Iterator[Hub]:
    """A Hub that answers until the block ends."""
    hub = Hub(dict(models))

    class Handler(_Handler):
        served = hub

    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as address:
        hub.url = f"http://{address}"
        yield hub


@contextmanager
def used_here(hub: Hub, home: Path) -> Iterator[None]:
    """Make huggingface_hub in this process, which has read its environment, use `hub`."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.delenv("HF_TOKEN", raising=False)
        yield


def files_of(directory: Path) -> dict[str, bytes]:
    """The files below `directory`, by their names in a repository."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def cached(home: Path, hub_id: str, files: Files) -> Path:
    """Lay `files` out as huggingface_hub caches them, and return the snapshot's directory."""
    folder = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / _commit(files)
    for made in (snapshot, folder / "blobs", folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(_commit(files))
    for name, contents in files.items():
        blob = hashlib.sha256(contents).hexdigest()
        (folder / "blobs" / blob).write_bytes(contents)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.served.asked.append(f"{self.command} {path}")
        if (match := _PATHS.fullmatch(path)) is None:
            match = _PATHS.fullmatch(f"{path}/revision/main")  # a repository alone
            assert match is not None, path
        kind, name, what = match[1] or match[2] or "models", match[3], match[4]
        known = self.served.datasets if kind == "datasets" else self.served.models
        repository = known.get(name)
        # The Hub says the same of what is not there and of what a stranger may not see.
        if repository is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if what == "resolve" and repository.token not in (None, given):
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        revision, _, rest = (match[5] or "main").partition("/")
        commit = repository.commit(revision)
        if commit is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        files = repository.files(revision)
        if what == "revision":
            siblings = [{"rfilename": file} for file in files]
            about = {"_id": "0", "id": name, "sha": commit, "private": False}
            self._send_json(about | {"siblings": siblings})
        elif what == "tree":
            self._send_json(_tree(files, rest, recursive="recursive=true" in self.path.lower()))
        elif what == "resolve" and rest in files:
            etag = f'"{_blob(files[rest])}"'
            self._send(200, files[rest], {"ETag": etag, "X-Repo-Commit": commit})
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(file: str, contents: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(contents), "oid": _blob(contents)}


def _tree(files: Files, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    """The files and folders in a folder."""
    begin = f"{folder}/" if folder else ""
    inside = [file for file in files if file.startswith(begin)]
    if recursive:
        return [_entry(file, files[file]) for file in inside]
    names = {begin + file.removeprefix(begin).split("/")[0] for file in inside}
    return [
        _entry(name, files[name])
        if name in files
        else {"type": "directory", "path": name, "size": 0, "oid": "0"}
        for name in sorted(names)
    ]


def _blob(contents: bytes) -> str:
    """What git calls a file."""
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()


def _commit(files: Files) -> str:
    """A commit that depends on names and contents, as git's does."""
    listed = "".join(f"{name} {_blob(files[name])}\n" for name in sorted(files))
    return hashlib.sha1(listed.encode()).hexdigest()

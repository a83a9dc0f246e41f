"""Which runs count in a report, and which of them are repeats of one server.

An INVALID run says nothing about its server, so it is left out of every number, unless no run is
valid.
"""

import dataclasses
from collections.abc import Sequence
from urllib.parse import urlsplit

from loadtest.runs.run import Run


def counted(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The runs that count and those that are left out, with a label of its own for each server."""
    runs = _servers_apart(runs)
    valid = [run for run in runs if run.verdict.valid]
    if not valid:
        return runs, []
    return valid, [run for run in runs if not run.verdict.valid]


def _servers_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs, with the address or the endpoint in labels that would else pool two servers.

    A label that somebody gave may be of several addresses: a server was started anew on another
    port. But the label of a run without one is its model's name, which two servers may share.
    Completions and chat never pool: their prompts differ.
    """
    addresses: dict[str, set[str]] = {}
    endpoints: dict[str, set[str]] = {}
    for run in runs:
        label = run.info["label"]
        endpoints.setdefault(label, set()).add(run.info.get("endpoint", ""))
        if label == run.info.get("model") and not run.info.get("start"):
            addresses.setdefault(label, set()).add(_address(run))
    found = []
    for run in runs:
        label = run.info["label"]
        at = f" at {_address(run)}" if len(addresses.get(label, ())) > 1 else ""
        by = f", {run.info['endpoint']}" if len(endpoints[label]) > 1 else ""
        info = run.info | {"label": f"{label}{at}{by}"}
        found.append(dataclasses.replace(run, info=info))
    return found


def _address(run: Run) -> str:
    url = urlsplit(run.info.get("base_url", ""))
    return f"{url.netloc}{url.path}"

"""The command that starts the client: locust in a process of its own, without its web page."""

import sys
from pathlib import Path

_LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
FAILED = "every request failed"  # begins the line that says so; the exit status is 1
HEADERS = "LOADTEST_HEADERS"  # variable: what each request carries, "NAME: VALUE" a line
INVALID = 3  # the client's exit status after a run that says nothing about the server


def client_command(url: str, model: str, schedule: Path, out: Path, *more: str) -> list[str]:
    """The command that replays a schedule against a server.

    Args:
        url: Base URL of the server.
        model: The name that the server gives its model.
        schedule: The schedule's file.
        out: Directory for the run; it must not exist.
        more: Further options of the client.
    """
    return [
        *(sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--only-summary"),
        *("--host", url, "--model", model, "--schedule", str(schedule), "--out", str(out)),
        *more,
    ]

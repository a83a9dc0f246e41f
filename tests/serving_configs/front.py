"""The committed nginx.conf, run by the real nginx before a server that stands in for vLLM."""

import contextlib
import http.server
import itertools
import os
import queue
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.serving_configs.debian import CONFIGS, program
from tests.support.local_servers import answering, free_port
from tests.support.waiting import PATIENCE, wait_until

GAP = 0.1  # seconds between two tokens of an endless stream
# Seconds after which the stand-in closes an idle connection. The committed front does after 4, and
# one without its setting after 60: no machine is so busy that they are mixed up.
KEEP_ALIVE = 40


@dataclass
class Upstream:
    """What the stand-in has seen; `port` is where it listens."""

    port: int = 0
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    client_left: threading.Event = field(default_factory=threading.Event)
    # /v1/one-by-one sends a token after the one before was read, which a test says here.
    token_read: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    # Who closed a connection that was idle.
    closed_by: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)


class _StandIn(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet, else each answer waits for an ACK
    timeout = KEEP_ALIVE
    seen: Upstream

    def handle_one_request(self) -> None:
        """Serve one, after saying who ended the wait for it if there was none."""
        try:
            nobody = not self.rfile.peek(1)
        except TimeoutError:
            self.seen.closed_by.put("server")
            self.close_connection = True
            return
        if nobody:
            self.seen.closed_by.put("front")
            self.close_connection = True
            return
        super().handle_one_request()

    def do_GET(self) -> None:
        self.seen.requests.append((self.path, dict(self.headers), b""))
        self._reply(200, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.requests.append((self.path, dict(self.headers), body))
        if self.path == "/v1/refused":
            return self._reply(429, b'{"error":{"message":"from vLLM"}}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = itertools.count() if self.path == "/v1/endless" else range(3)
        try:
            for token in tokens:
                event = b"data: %d\n\n" % token
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                self.wfile.flush()
                if self.path == "/v1/one-by-one":
                    self.seen.token_read.acquire(timeout=PATIENCE)
                elif self.path == "/v1/endless":
                    time.sleep(GAP)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.seen.client_left.set()
            self.close_connection = True

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Only clients that left, which is what a test does on purpose."""


@contextlib.contextmanager
def upstream() -> Iterator[Upstream]:
    seen = Upstream()
    handler = type("Handler", (_StandIn,), {"seen": seen})
    server = _Server(("127.0.0.1", 0), handler)
    seen.port = server.server_port
    with answering(server):
        yield seen


NGINX = CONFIGS / "nginx"
ADDRESS = re.compile(r"(?<=server )[\w.]+:8000\b")


def written_conf(
    directory: Path,
    port: int,
    servers: str = "servers.conf",
    rate: str = "100000r/s",
    workers: str = "auto",
    beside: int | None = None,
    **upstreams: int,
) -> Path:
    """The committed files with other ports, and with `directory` for /tmp.

    Args:
        directory: where the files are written.
        port: where nginx is to listen.
        servers: the file that says where the servers are.
        rate: how many requests of one address are let through for long. The committed rate is the
            machine's to keep or to miss.
        workers: how many processes nginx has.
        beside: the port of one more server, which the file does not name.
        upstreams: the port of each server that this file names, by its host; `local` is 127.0.0.1.
    """
    text = (NGINX / "nginx.conf").read_text()
    for old, new in (
        ("rate=50r/s", f"rate={rate}"),
        ("worker_processes auto", f"worker_processes {workers}"),
        ("listen 8080 ", f"listen 127.0.0.1:{port} "),
        ("/tmp/", f"{directory}/"),
        ("access_log /dev/stdout", f"access_log {directory}/access.log"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    conf = directory / "nginx.conf"
    conf.write_text(text)
    shutil.copy(NGINX / "pool.conf", directory)

    def elsewhere(address: re.Match[str]) -> str:
        host = address[0].removesuffix(":8000")
        return f"127.0.0.1:{upstreams['local' if host == '127.0.0.1' else host]}"

    text, named = ADDRESS.subn(elsewhere, (NGINX / servers).read_text())
    assert named, servers
    if beside is not None:
        text = re.sub(r"( +server \S+:)\d+(.*\n)", rf"\g<0>\g<1>{beside}\2", text)
    (directory / "servers.conf").write_text(text)
    return conf


@contextlib.contextmanager
def nginx(directory: Path, servers: str = "servers.conf", **options: Any) -> Iterator[int]:
    """The port of a running front; arguments as of `written_conf`."""
    port = free_port()
    conf = written_conf(directory, port, servers, **options)
    # Workers of a root's nginx are nobody, to whom pytest's directories are closed.
    more = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    command = [program("nginx"), "-c", str(conf), "-p", str(directory), "-g", more]
    with (directory / "error.log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or _listens(port), PATIENCE, "nginx listens")
        assert process.poll() is None, (directory / "error.log").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _listens(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port)).close()
    return True

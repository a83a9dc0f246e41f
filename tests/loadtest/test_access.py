"""Servers that run elsewhere: a path, headers, keys, and certificates of one's own authority."""

import math
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from loadtest.ab.server import remote
from loadtest.client.client import send
from loadtest.errors import LoadTestError
from loadtest.runs.access import request_headers, server_version
from loadtest.runs.records import Record
from loadtest.runs.server_metrics import scrape
from loadtest.runs.target import Target
from tests.loadtest.servers import DONE, STREAM, TOKEN, scripted


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of 127.0.0.1 that no system believes."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    make = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    about = "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    key = subprocess.run(
        [*make.split(), *about.split(), "-keyout", "-", "-out", path.with_suffix(".crt")],
        capture_output=True,
        check=True,
    ).stdout
    path.write_bytes(key + path.with_suffix(".crt").read_bytes())
    return path


def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def answer_to(target: Target) -> Record:
    record = Record(0, time.perf_counter(), 1, 1)
    send(target, b"{}", record, time.perf_counter, math.inf)
    return record


@pytest.mark.parametrize("believed", ["ca", "insecure", "system"])
def test_a_certificate_is_believed_if_its_authority_or_any_is(
    believed: str, certificate: Path
) -> None:
    with scripted(STREAM + TOKEN + DONE, connections=2, tls=tls(certificate)) as url:
        ca = str(certificate) if believed == "ca" else None
        target = Target(url, "m", ca=ca, insecure=believed == "insecure")
        record = answer_to(target)
        if believed == "system":
            assert "certificate verify failed" in str(record.error)
            with pytest.raises(LoadTestError, match=url):
                remote(target)
        else:
            assert record.error is None
            assert remote(target).process is None


def test_the_path_and_the_headers_are_in_every_request(tmp_path: Path) -> None:
    heard: list[bytes] = []
    (tmp_path / "key").write_text("sk-1\n")
    headers = request_headers(["X-Team: a b"], tmp_path / "key")
    nothing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with scripted(nothing, connections=4, heard=heard) as url:
        target = Target(f"{url}/team/", "m", "chat", headers=headers)
        answer_to(target)
        remote(target)
        assert scrape(target) == {}
        assert server_version(target) == "unknown"
    asks = [head.split(b" HTTP/")[0].decode() for head in heard]
    assert asks == [
        "POST /team/v1/chat/completions",
        "GET /team/v1/models",
        "GET /team/metrics",
        "GET /team/version",
    ]
    for head in heard:
        assert b"\r\nX-Team: a b" in head
        assert b"\r\nAuthorization: Bearer sk-1" in head


def test_a_server_that_refuses_the_key_or_is_not_there_is_an_error() -> None:
    refuse = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
    with scripted(refuse) as url, pytest.raises(LoadTestError, match="HTTP 401"):
        remote(Target(url, "m"))
    with pytest.raises(LoadTestError, match=url):
        remote(Target(url, "m"))

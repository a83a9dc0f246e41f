"""How to reach a server: its address, the headers of each request, and whom its certificate is of.

Only this module opens connections to a measured server. They go straight to it: proxies that the
environment names are not asked, because they would be measured, too.
"""

import functools
import http.client
import json
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtest.errors import LoadTestError
from loadtest.runs.target import Target

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def request_headers(
    given: Sequence[str], key_file: Path | None = None
) -> tuple[tuple[str, str], ...]:
    """What each request carries: the headers given, and a key.

    Args:
        given: "NAME: VALUE" each.
        key_file: holds the key; None: OPENAI_API_KEY, if that is set and no Authorization given.

    Raises:
        LoadTestError: for what no header may have. It never has the value, which may be secret.
    """
    headers = {}
    for text in given:
        name, _, value = text.partition(":")
        if not _NAME.fullmatch(name):
            raise LoadTestError("headers: expected 'NAME: VALUE' with a name of ASCII letters")
        headers[name] = _checked(value.strip(), f"header {name}")
    has_own = "authorization" in map(str.lower, headers)
    key, where = "" if has_own else os.environ.get("OPENAI_API_KEY", ""), "OPENAI_API_KEY"
    if key_file is not None and has_own:
        raise LoadTestError(f"{key_file} and the header Authorization: give one of them")
    if key_file is not None:
        where = str(key_file)
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LoadTestError(f"{key_file}: no key can be read from it") from error
    if key or key_file is not None:
        headers["Authorization"] = f"Bearer {_checked(key, where)}"
    return tuple(headers.items())


def _checked(value: str, where: str) -> str:
    if not _VALUE.fullmatch(value):
        raise LoadTestError(
            f"{where}: its {len(value)} characters (not shown) are empty, or have a line end, a "
            "space at an end or a letter beyond ASCII, which no header may have"
        )
    return value


def connection(target: Target, timeout: float) -> http.client.HTTPConnection:
    """A connection to the server, which is not open yet."""
    url = urlsplit(target.base_url)
    host = url.hostname or ""
    if url.scheme == "https":
        tls = tls_context(target.ca, target.insecure)
        return http.client.HTTPSConnection(host, url.port, timeout=timeout, context=tls)
    return http.client.HTTPConnection(host, url.port, timeout=timeout)


# Built once: loading the root certificates takes tens of milliseconds and blocks every other
# request of this process.
@functools.cache
def tls_context(ca: str | None, insecure: bool) -> ssl.SSLContext:
    """Whose certificates are believed. Raises LoadTestError if `ca` has none."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one, too
        raise LoadTestError(f"{ca}: no certificates can be read from it") from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def get(target: Target, path: str, timeout: float, most: int = 16 << 20) -> tuple[int, bytes]:
    """The status and the first `most` bytes of the answer to GET, below the target's base URL.

    Raises OSError if there is none.
    """
    link = connection(target, timeout)
    try:
        link.request("GET", target.prefix + path, headers=dict(target.headers))
        response = link.getresponse()
        return response.status, response.read(most)
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP: {error}") from error
    finally:
        link.close()


def server_version(target: Target) -> str:
    """The version that the server reports at /version, as vLLM does, or "unknown"."""
    try:
        content: Any = json.loads(get(target, "/version", 5.0, 10_000)[1])
        return str(content["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"

"""Requests to an OpenAI-compatible server, whose answers are read up to a number of bytes.

The openai package reads answers of any length, which a server that is not what it seems can make as
long as it likes.
"""

import json
import os
import time
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pydantic import BaseModel, ValidationError

from vllm_gac.errors import ServerError
from vllm_gac.errors.shown import shown

# What is read of an answer beside what was asked for, and of an error.
_BYTES, _ERROR_BYTES = 4 << 20, 1000
# A server that is too busy, or an upstream that restarts, is asked again after so many seconds.
_BUSY, _WAITS = (429, 502, 503, 504), (0.5, 2.0)
# Seconds without a byte: for a list of models, which says whether anyone is there, and for others.
_LISTS, _ANSWERS = 30, 600

_Answer = TypeVar("_Answer", bound=BaseModel)


def ask(
    url: str, path: str, body: dict[str, Any] | None, kind: type[_Answer], most: int = 0
) -> _Answer:
    """Send a request (GET without a body, else POST) and validate its answer.

    Args:
        url: The server's, which mostly ends in /v1. OPENAI_API_KEY is sent if it is set.
        path: What follows it.
        body: What is sent as JSON.
        kind: What the answer must be.
        most: How many bytes of what was asked for the answer may have; 4 MB are read beside it.

    Raises:
        ServerError: There is no such answer.
    """
    raw = _read(_request(url, path, body), url, most + _BYTES)
    if len(raw) > most + _BYTES:
        raise ServerError(
            f"{url}{path}: an answer of more than {most + _BYTES:,} bytes, which is more than was "
            "asked for; is it an OpenAI-compatible server?"
        )
    try:
        return kind.model_validate(json.loads(raw))
    except (ValidationError, ValueError, RecursionError) as e:  # the last one: of many brackets
        raise ServerError(
            f"{url}{path}: not an answer of an OpenAI-compatible server; "
            "expected http://HOST:PORT/v1"
        ) from e


def _request(url: str, path: str, body: dict[str, Any] | None) -> Request:
    key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"
    if not (key.isascii() and key.isprintable()):
        raise ServerError("OPENAI_API_KEY: has characters that no key can have; set it again")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return Request(url + path, None if body is None else json.dumps(body).encode(), headers)


def _read(request: Request, url: str, most: int) -> bytes:
    """The answer, up to one byte more than `most`."""
    for wait in (*_WAITS, None):
        try:
            with urlopen(request, timeout=_ANSWERS if request.data else _LISTS) as response:
                found: bytes = response.read(most + 1)
                return found
        except HTTPError as e:
            if e.code not in _BUSY or wait is None:
                raise ServerError(_refusal(request, e)) from e
        except (OSError, HTTPException, ValueError) as e:  # the last one: of an address
            if wait is None or isinstance(e, ValueError):
                why = getattr(e, "reason", None) or e
                raise ServerError(f"{url}: no answer ({why}); is the server running?") from e
        time.sleep(wait)
    raise AssertionError  # the last turn returns or raises


def _refusal(request: Request, error: HTTPError) -> str:
    try:
        said = error.read(_ERROR_BYTES).decode(errors="replace")
    except (OSError, HTTPException):
        said = ""
    to_do = "; set OPENAI_API_KEY to its key" if error.code in (401, 403) else ""
    answer = shown(said or error.reason, _ERROR_BYTES)
    return f"{request.full_url}: Error code: {error.code} - {answer}{to_do}"

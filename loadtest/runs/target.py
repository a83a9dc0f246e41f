"""The server that a run sends its requests to."""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from loadtest.errors import LoadTestError

Endpoint = Literal["completions", "chat"]
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and how.

    Attributes:
        base_url: what comes before /v1, such as http://127.0.0.1:8000 or https://HOST/team/llm.
        model: model name to ask the server for.
        endpoint: whether prompts are token ids (completions) or messages (chat).
        timeout: seconds without a byte after which a request fails.
        ignore_eos: pins the answer to the scheduled length. This is an extension of vLLM and
            SGLang; switch it off for servers that refuse unknown fields.
        headers: what each request carries beside its own, such as a key.
        ca: file of the certificates that are believed in place of the system's.
        insecure: whether any certificate is believed.
    """

    base_url: str
    model: str
    endpoint: Endpoint = "completions"
    timeout: float = 300.0
    ignore_eos: bool = True
    headers: tuple[tuple[str, str], ...] = ()
    ca: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        url = self.base_url
        try:
            parts = urlsplit(url)
            right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            right = False
        if not right or parts.query or parts.fragment or re.search(r"[^\x21-\x7e]", url):
            raise LoadTestError(f"{url!r}: expected http://HOST:PORT or https://HOST/PATH")
        if parts.username is not None or parts.password is not None:
            raise LoadTestError(
                f"a URL of {parts.hostname}: leave out the name and the password; give a header"
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise LoadTestError(f"{url!r}: leave out /v1, which the client adds")
        if parts.scheme == "http" and (self.ca is not None or self.insecure):
            raise LoadTestError(f"{url}: has no certificate to check; leave out ca and insecure")

    @property
    def prefix(self) -> str:
        """What the base URL has after the host, without a slash at its end."""
        return urlsplit(self.base_url).path.rstrip("/")

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return self.prefix + _PATHS[self.endpoint]

"""The server that a run sends its requests to."""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from loadtest.errors import LoadTestError

Endpoint = Literal["completions", "chat"]
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        base_url: root of the server, without a path.
        model: model name to ask the server for.
        endpoint: whether prompts are token ids (completions) or messages (chat).
        timeout: seconds without a byte after which a request fails.
        ignore_eos: pins the answer to the scheduled length. This is an extension of vLLM and
            SGLang; switch it off for servers that refuse unknown fields.
    """

    base_url: str
    model: str
    endpoint: Endpoint = "completions"
    timeout: float = 300.0
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
            raise LoadTestError(
                f"{self.base_url!r} is not the root of a server; expected http://HOST:PORT"
            )

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return _PATHS[self.endpoint]

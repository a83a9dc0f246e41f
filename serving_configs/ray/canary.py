"""A Ray Serve application that splits the requests for one model name between two others.

    serve run serving_configs/ray/canary.yaml

It stands before two applications of app.py, /gac and /dense, whose servers have the same
`--served-model-name`. It draws a side for each request and passes it on through Serve's own proxy,
so the replicas, the scaling and the queues of each side are Serve's. That costs one hop more.

`/metrics` answers for both sides, and labels every sample with its `variant`: what the dashboard's
row Canary compares.
"""

import asyncio
import hashlib
import random
from typing import Any

from aiohttp import ClientConnectionError, ClientError, ClientTimeout
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, HttpUrl
from ray import serve
from ray.serve import Application

from serving_configs.ray.arguments import read_arguments
from serving_configs.ray.forward import METHODS, passed_on, send, session, unavailable
from serving_configs.ray.metrics import merged

CANARY, OTHERS = "gac", "dense"
SESSION = "x-session-id"
SCRAPE_SECONDS = 10

api = FastAPI(openapi_url=None)


class Arguments(BaseModel):
    """`args` of the application in a Serve config file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    share: float = Field(ge=0, le=1)
    # Of Serve's proxy on the node of this replica: `http_options` of the config file.
    address: HttpUrl = Field(HttpUrl("http://127.0.0.1:8000"), strict=False)


def application(args: dict[str, Any]) -> Application:
    """What `import_path` of a Serve config file names, built from the file's `args`.

    Raises:
        RayServeException: `args` is wrong; Serve shows its one sentence as the status.
    """
    known = "`share`, of requests that go to gac, and `address`"
    arguments = read_arguments(Arguments, args, known)
    return Canary.bind(arguments.share, str(arguments.address).rstrip("/"))


def side_of(session_id: str | None, share: float) -> str:
    """The side that a request goes to.

    Args:
        session_id: what the client calls its session: all requests of one go to one side. Without
            it each request is drawn anew.
        share: of sessions, or of requests, that go to the canary.
    """
    if session_id:
        digest = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest) / 2**64
    else:
        drawn = random.random()  # no secret
    return CANARY if drawn < share else OTHERS


@serve.deployment(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0.5})
@serve.ingress(api)
class Canary:
    """Draws a side for each request, and passes it on."""

    def __init__(self, share: float, address: str) -> None:
        self._share = share
        self._address = address
        self._serve = session()

    async def __del__(self) -> None:
        await self._serve.close()

    @api.get("/metrics")
    async def metrics(self) -> Response:
        """The metrics of both sides; of one that does not answer in time there is nothing."""

        async def of(side: str) -> str:
            try:
                timeout = ClientTimeout(total=SCRAPE_SECONDS)
                url = f"{self._address}/{side}/metrics"
                async with self._serve.get(url, timeout=timeout) as answer:
                    return await answer.text() if answer.ok else ""
            except (ClientError, TimeoutError):
                return ""

        sides = (CANARY, OTHERS)
        texts = dict(zip(sides, await asyncio.gather(*map(of, sides)), strict=True))
        return Response(
            merged(texts, "variant"), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @api.api_route("/{path:path}", methods=METHODS)
    async def rest(self, request: Request) -> Response:
        """Everything else is a request for one side.

        A canary that answers 503, because it is full or gone, costs nobody an answer: the other
        side gets the request then.
        """
        side = side_of(request.headers.get(SESSION), self._share)
        try:
            answer = await send(request, self._serve, f"{self._address}/{side}")
            if side == CANARY and answer.status == 503:
                answer.close()
                answer = await send(request, self._serve, f"{self._address}/{OTHERS}")
        except ClientConnectionError:
            return unavailable("No server is available; try again.")
        return passed_on(answer)

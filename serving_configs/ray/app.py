"""A Ray Serve application: replicas of `vllm serve` behind one address.

Each replica runs a real `vllm serve` on a Unix socket of its own and passes bytes between it and
Serve. What clients see is therefore vLLM's API and nothing else, with its errors, its streams and
its limits; of vLLM only the command line is relied on. An engine inside the replica (AsyncLLM with
vLLM's FastAPI app) would save a hop through a socket, but depend on internals that move with each
release, and share an interpreter lock with Serve. Ray Serve adds what a single server lacks:
replicas, autoscaling, replacement of those that died, draining of those that go.

    serve run serving_configs/ray/cpu-demo.yaml

`/metrics` is the one path that is not passed on: it answers for all replicas (metrics.py).
"""

import asyncio
import os
import shlex
from typing import Any

from aiohttp import ClientError, ClientTimeout
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serving_configs.ray.engine import Engine
from serving_configs.ray.forward import METHODS, forward, session
from serving_configs.ray.metrics import merged

SCRAPE_SECONDS = 5

api = FastAPI(openapi_url=None)  # no pages of its own: /docs is vLLM's


class Arguments(BaseModel):
    """`args` of an application in a Serve config file: what follows `vllm serve`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    flags: str = ""

    @field_validator("flags")
    @classmethod
    def _leaves_the_address_to_serve(cls, flags: str) -> str:
        for flag in shlex.split(flags):
            if flag.split("=")[0] in ("--host", "--port", "--uds") or flag.startswith("--ssl-"):
                raise ValueError(
                    f"{flag} is not possible, as replicas listen on sockets of their own; see "
                    "`http_options`, which are of what clients connect to"
                )
        return flags


def application(args: dict[str, Any]) -> Application:
    """What `import_path` of a Serve config file names, built from the file's `args`.

    Raises:
        RayServeException: `args` is wrong; Serve shows its one sentence as the status.
    """
    try:
        arguments = Arguments.model_validate(args)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("args", *first["loc"])))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "unknown; there are `model` and `flags`, which takes what `vllm serve` takes"
        raise RayServeException(f"{field}: {message}") from None
    return Replica.bind(arguments.model, shlex.split(arguments.flags))


# The defaults of a Serve config file that says nothing else. Serve's own for the first, 5, would
# keep a batch from ever being larger.
@serve.deployment(
    max_ongoing_requests=256,
    health_check_period_s=5,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=120,
)
@serve.ingress(api)
class Replica:
    """One `vllm serve`: passes requests on to it, says whether it is well, ends with it."""

    async def __init__(self, model: str, flags: list[str]) -> None:
        self._watch: asyncio.Task[None] | None = None
        self._engine = Engine(model, flags)
        self._vllm = session(self._engine.socket)
        await self._engine.wait_until_healthy(self._vllm)
        self._watch = asyncio.create_task(self._end_with_engine())

    async def __del__(self) -> None:
        """Called by Serve once the last request is answered, or its time is over."""
        if self._watch:
            self._watch.cancel()
        await self._vllm.close()
        await asyncio.to_thread(self._engine.stop)

    async def _end_with_engine(self) -> None:
        """A replica without an engine answers at once, with errors, which draws requests to it.

        So it does not wait for a health check to fail. A second is enough for the errors to leave.
        """
        while self._engine.running():
            await asyncio.sleep(0.1)
        self._engine.stop()
        await asyncio.sleep(1)
        os._exit(1)

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica for which this fails three times in a row."""
        async with self._vllm.get("/health") as answer:
            answer.raise_for_status()

    async def own_metrics(self) -> tuple[str, str]:
        """This replica's id, and its engine's metrics; none if it does not answer in time."""
        replica = serve.get_replica_context().replica_tag
        try:
            timeout = ClientTimeout(total=SCRAPE_SECONDS)
            async with self._vllm.get("/metrics", timeout=timeout) as answer:
                return replica, await answer.text() if answer.ok else ""
        except (ClientError, TimeoutError):
            return replica, ""

    @api.get("/metrics")
    async def metrics(self) -> Response:
        """The metrics of all replicas, each told apart by the label `replica`."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await handle.broadcast("own_metrics").results_async(
            timeout_s=2 * SCRAPE_SECONDS, return_exceptions=True
        )
        texts = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return Response(merged(texts), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.api_route("/{path:path}", methods=METHODS)
    async def rest(self, request: Request) -> Response:
        """Everything else is between the client and vLLM."""
        return await forward(request, self._vllm)

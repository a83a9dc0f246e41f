"""A side of the canary that runs no model: says its name, or refuses."""

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from ray import serve
from ray.serve import Application

api = FastAPI(openapi_url=None)


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Side:
    def __init__(self, name: str) -> None:
        self._name = name
        self._asked = 0

    @api.get("/metrics")
    async def metrics(self) -> Response:
        return Response(f"# TYPE asked_total counter\nasked_total {self._asked}\n")

    @api.api_route("/{path:path}", methods=["GET", "POST"])
    async def rest(self, request: Request) -> Response:
        self._asked += 1
        if self._name == "gac" and request.headers.get("x-refuse"):
            return JSONResponse({"error": "full"}, 503)
        body = (await request.body()).decode()
        return JSONResponse({"side": self._name, "path": request.url.path, "body": body})


def application(args: dict[str, Any]) -> Application:
    return Side.bind(args["name"])

"""The Serve config files fit the application and the flags they name; what does not is refused."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_configs.debian import CONFIGS, ROOT

pytest.importorskip("ray", reason="needs ray: make install-ray")

from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

from serving_configs.ray import canary
from serving_configs.ray.app import application

FILES = sorted((CONFIGS / "ray").glob("*.yaml"))


def loaded(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((CONFIGS / "ray" / name).read_text())
    return config


def named(flags: str) -> dict[str, Any]:
    """The file of serving_configs/vllm that the flags name, here or in the image."""
    words = shlex.split(flags)
    path = words[words.index("--config") + 1].replace("/etc/vllm-gac", "serving_configs/vllm")
    config: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return config


SERVED = [
    pytest.param(application, id=f"{path.stem}-{application['name']}")
    for path in FILES
    for application in loaded(path.name)["applications"]
    if application["import_path"] == "serving_configs.ray.app:application"
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_serve_takes_every_file_as_it_stands(path: Path) -> None:
    schema = ServeDeploySchema.model_validate(loaded(path.name))
    builders = {
        "serving_configs.ray.app:application": (application, "Replica"),
        "serving_configs.ray.canary:application": (canary.application, "Canary"),
    }
    for served in schema.applications:
        build, name = builders[served.import_path]
        (deployment,) = served.deployments
        assert build(served.args)._bound_deployment.name == deployment.name == name


@pytest.mark.parametrize("served", SERVED)
def test_serve_and_vllm_have_the_same_limits(served: dict[str, Any]) -> None:
    (deployment,) = served["deployments"]
    flags = named(served["args"]["flags"])
    assert deployment["max_ongoing_requests"] == flags["max-num-queued-reqs"]
    # Serve ends a replica after this; before, it may take vLLM this to drain.
    assert deployment.get("graceful_shutdown_timeout_s", 120) > flags["shutdown-timeout"]
    gpus = deployment["ray_actor_options"].get("num_gpus", 0)
    assert gpus in (0, flags.get("tensor-parallel-size", 1))
    if scaling := deployment.get("autoscaling_config"):
        assert "num_replicas" not in deployment
        assert 0 < scaling["target_ongoing_requests"] < flags["max-num-seqs"]


def test_the_sides_of_the_canary_are_where_it_looks_and_have_one_name() -> None:
    config = loaded("canary.yaml")
    split, *sides = config["applications"]
    assert split["route_prefix"] == "/"
    assert [side["route_prefix"] for side in sides] == [f"/{canary.CANARY}", f"/{canary.OTHERS}"]
    names = {side["args"]["flags"].split("--served-model-name ")[1].split()[0] for side in sides}
    assert len(names) == 1
    address = canary.Arguments.model_validate(split["args"]).address
    assert address.port == config["http_options"]["port"]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({}, "args.share: Field required"),
        ({"share": 10}, "args.share: Input should be less than or equal to 1"),
        ({"share": "0.1"}, "args.share: Input should be a valid number"),
        (
            {"share": 0.1, "side": "gac"},
            "args.side: unknown; there are `share`, of requests that go to gac, and `address`",
        ),
    ],
)
def test_wrong_arguments_of_the_canary_are_refused_in_a_sentence(
    args: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RayServeException) as error:
        canary.application(args)
    assert str(error.value) == sentence


def test_requests_are_drawn_by_their_share_and_sessions_stay() -> None:
    assert {canary.side_of(None, 0.0) for _ in range(50)} == {"dense"}
    assert {canary.side_of(None, 1.0) for _ in range(50)} == {"gac"}
    sides = [canary.side_of(f"session {number}", 0.1) for number in range(5000)]
    assert 400 < sides.count("gac") < 600  # of 5000 at 10 %: five standard deviations
    assert sides == [canary.side_of(f"session {number}", 0.1) for number in range(5000)]
    # A larger share takes sessions from dense, and none away from gac.
    larger = [canary.side_of(f"session {number}", 0.2) for number in range(5000)]
    assert all(now == "gac" for before, now in zip(sides, larger, strict=True) if before == "gac")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({}, "args.model: Field required"),
        ({"model": 7}, "args.model: Input should be a valid string"),
        (
            {"model": "m", "flag": ""},
            "args.flag: unknown; there are `model` and `flags`, which takes what `vllm serve` "
            "takes",
        ),
        ({"model": "m", "flags": ["--seed", "1"]}, "args.flags: Input should be a valid string"),
        ({"model": "m", "flags": "--served-model-name 'm"}, "args.flags: No closing quotation"),
        (
            {"model": "m", "flags": "--load-format gac --port=8001"},
            "args.flags: --port=8001 is not possible, as replicas listen on sockets of their own; "
            "see `http_options`, which are of what clients connect to",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RayServeException) as error:
        application(args)
    assert str(error.value) == sentence

"""The Serve config files fit the application and the flags they name; what does not is refused."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_configs.programs import CONFIGS, ROOT

pytest.importorskip("ray")

from ray.serve.exceptions import RayServeException
from ray.serve.schema import ServeDeploySchema

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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_files_match_the_serve_schema(path: Path) -> None:
    (served,) = ServeDeploySchema.model_validate(loaded(path.name)).applications
    assert served.import_path == "serving_configs.ray.app:application"
    (deployment,) = served.deployments
    assert application(served.args)._bound_deployment.name == deployment.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_serve_limits_match_vllm_flags(path: Path) -> None:
    (served,) = loaded(path.name)["applications"]
    (deployment,) = served["deployments"]
    flags = named(served["args"]["flags"])
    assert deployment["max_ongoing_requests"] == flags["max-num-queued-reqs"]
    # Serve ends a replica after this; before, it may take vLLM this to drain.
    assert deployment.get("graceful_shutdown_timeout_s", 120) > flags["shutdown-timeout"]
    if scaling := deployment.get("autoscaling_config"):
        assert 0 < scaling["target_ongoing_requests"] < flags["max-num-seqs"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({}, "args.model"),
        ({"model": 7}, "args.model"),
        ({"model": "m", "flag": ""}, "args.flag"),
        ({"model": "m", "flags": ["--seed", "1"]}, "args.flags"),
        ({"model": "m", "flags": "--served-model-name 'm"}, "args.flags"),
        ({"model": "m", "flags": "--load-format gac --port=8001"}, "--port"),
    ],
)
def test_invalid_arguments_are_refused(args: dict[str, Any], named: str) -> None:
    with pytest.raises(RayServeException, match=named):
        application(args)

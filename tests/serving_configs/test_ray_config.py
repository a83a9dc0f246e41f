"""The Serve config files fit Ray's application and vLLM's arguments."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_configs.programs import CONFIGS

pytest.importorskip("ray")

from ray.serve.schema import ServeDeploySchema

FILES = sorted((CONFIGS / "ray").glob("*.yaml"))
# Of the server in front of an engine, which is Serve here.
OF_A_SERVER = {
    "served-model-name",
    "max-num-queued-reqs",
    "shutdown-timeout",
    "disable-access-log-for-endpoints",
    "disable-fastapi-docs",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_files_match_the_schemas(path: Path) -> None:
    from ray.serve.llm import LLMConfig

    (served,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    (raw,) = served.args["llm_configs"]
    deployment = LLMConfig.model_validate(raw).deployment_config
    if scaling := deployment.get("autoscaling_config"):
        assert 0 < scaling["target_ongoing_requests"] < raw["engine_kwargs"]["max_num_seqs"]


@pytest.mark.parametrize(
    ("name", "vllm"), [("cpu-demo", "cpu-demo"), ("one-gpu-replicas", "one-gpu")]
)
def test_engines_have_the_flags_of_vllm_serve(name: str, vllm: str) -> None:
    config = yaml.safe_load((CONFIGS / "ray" / f"{name}.yaml").read_text())
    (of_model,) = config["applications"][0]["args"]["llm_configs"]
    flags: dict[str, Any] = yaml.safe_load((CONFIGS / "vllm" / f"{vllm}.yaml").read_text())
    expected = {
        flag: 10**9 if value == "1G" else value
        for flag, value in flags.items()
        if flag not in OF_A_SERVER
    }
    grammar = of_model["engine_kwargs"].pop("structured_outputs_config")
    engine = {key.replace("_", "-"): value for key, value in of_model["engine_kwargs"].items()}
    assert engine | {"structured-outputs-config.backend": grammar["backend"]} == expected

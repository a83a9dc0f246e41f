"""docker-compose.yml, the Dockerfile and the chart's values agree with what they name."""

import re
import tomllib
from typing import Any

import yaml
from packaging.requirements import Requirement

from tests.serving_configs.programs import CONFIGS, ROOT

SERVICES: dict[str, Any] = yaml.safe_load((CONFIGS / "docker-compose.yml").read_text())["services"]
DOCKERFILE = (CONFIGS / "Dockerfile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_image_versions_match_requirements() -> None:
    (base,) = re.findall(r"^FROM vllm/vllm-openai:v(.+)$", DOCKERFILE, re.M)
    (vllm,) = map(Requirement, EXTRAS["serve"])
    assert base in vllm.specifier


def test_mounted_and_copied_files_exist() -> None:
    volumes = [volume for service in SERVICES.values() for volume in service["volumes"]]
    mounted = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    assert len(mounted) == 3
    assert all((CONFIGS / path).exists() for path in mounted), mounted
    copies = [line.split() for line in DOCKERFILE.splitlines() if line.startswith("COPY")]
    kept = (CONFIGS / "Dockerfile.dockerignore").read_text().splitlines()
    for path in (path for copy in copies for path in copy[1:-1]):
        assert (ROOT / path).exists(), path
        assert f"!{path}" in kept, path


def test_service_addresses_match() -> None:
    prometheus = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["vllm:8000"]}]
    provisioning = CONFIGS / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    boards = yaml.safe_load((provisioning / "dashboards" / "vllm-gac.yml").read_text())
    path = boards["providers"][0]["options"]["path"]
    assert f"./grafana/dashboards:{path}:ro" in SERVICES["grafana"]["volumes"]


def test_servers_need_a_key_or_bind_to_localhost() -> None:
    assert SERVICES["vllm"]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert SERVICES["vllm"]["cap_drop"] == ["ALL"]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", DOCKERFILE, re.M)
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_helm_values_match_the_image() -> None:
    values = yaml.safe_load((CONFIGS / "production-stack.yaml").read_text())["servingEngineSpec"]
    (model,) = values["modelSpec"]
    flags = yaml.safe_load((CONFIGS / "vllm" / "one-gpu.yaml").read_text())
    assert model["vllmConfig"]["extraArgs"][-1] == "/etc/vllm-gac/one-gpu.yaml"
    assert model["vllmConfig"]["maxModelLen"] == flags["max-model-len"]
    assert model["vllmConfig"]["enablePrefixCaching"] == flags["enable-prefix-caching"]
    assert f"USER {values['securityContext']['runAsUser']}:" in DOCKERFILE


def test_no_container_has_a_directory_of_metrics_that_outlives_its_processes() -> None:
    values = yaml.safe_load((CONFIGS / "production-stack.yaml").read_text())["servingEngineSpec"]
    # Otherwise the chart's template sets the variable.
    assert [model["vllmConfig"]["v0"] for model in values["modelSpec"]] == ["1"]
    assert not any(
        "PROMETHEUS_MULTIPROC_DIR" in str(text) for text in (SERVICES, DOCKERFILE, values)
    )

"""docker-compose.yml and the Dockerfile agree with what they mount, pin and expose."""

import re
import tomllib
from typing import Any

import yaml

from tests.serving_configs.debian import CONFIGS, ROOT
from vllm_gac import __version__

COMPOSE = yaml.safe_load((CONFIGS / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_image_is_pinned_to_a_release() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+\.\d+\.\d+(-alpine)?$", service["image"]), name
    assert SERVICES["vllm"]["image"] == f"vllm-gac:{__version__}"


def test_the_base_image_is_the_vllm_that_the_extra_allows() -> None:
    (base,) = re.findall(r"^FROM vllm/vllm-openai:v(.+)$", dockerfile(), re.M)
    assert EXTRAS["serve"] == [f"vllm=={base.rpartition('.')[0]}.*"]


def test_grafana_is_the_one_that_the_dashboard_is_written_for() -> None:
    version = EXTRAS["grafana"][0].partition("!")[2]
    assert SERVICES["grafana"]["image"] == f"grafana/grafana:{version}"


def test_what_is_mounted_and_copied_is_there() -> None:
    mounted = [
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    ]
    assert len(mounted) >= 4
    assert all((CONFIGS / path).exists() for path in mounted), mounted
    copies = [line.split() for line in dockerfile().splitlines() if line.startswith("COPY")]
    kept = (CONFIGS / "Dockerfile.dockerignore").read_text().splitlines()
    for path in (path for copy in copies for path in copy[1:-1]):
        assert (ROOT / path).exists(), path
        assert f"!{path}" in kept, path


def test_ports_are_those_that_are_listened_on() -> None:
    conf = (CONFIGS / "nginx" / "nginx.conf").read_text()
    assert SERVICES["nginx"]["ports"] == ["8080:8080"]
    assert "listen 8080 " in conf
    assert "server vllm:8000 " in conf
    assert "vllm" in SERVICES
    targets = yaml.safe_load((CONFIGS / "prometheus" / "targets" / "vllm.yml").read_text())
    assert targets == [{"targets": ["vllm:8000"]}]
    # Neither vLLM's own port nor Prometheus is open to the outside.
    assert {name for name, service in SERVICES.items() if "ports" in service} == {
        "nginx",
        "grafana",
    }


def test_grafana_finds_the_datasource_and_the_dashboard() -> None:
    provisioning = CONFIGS / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090"
    prometheus = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    boards = yaml.safe_load((provisioning / "dashboards" / "vllm-gac.yml").read_text())
    (provider,) = boards["providers"]
    volumes = SERVICES["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes


def dockerfile() -> str:
    return (CONFIGS / "Dockerfile").read_text()

"""docker-compose.yml and the Dockerfile agree with what they mount, pin and expose."""

import re
import subprocess
import tomllib
from typing import Any

import yaml
from packaging.requirements import Requirement

from tests.serving_configs.debian import CONFIGS, ROOT, program
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
    (vllm,) = map(Requirement, EXTRAS["serve"])
    assert vllm.name == "vllm"
    assert base in vllm.specifier


def test_grafana_is_the_one_that_the_dashboard_is_written_for() -> None:
    version = EXTRAS["grafana"][0].partition("!")[2]
    assert SERVICES["grafana"]["image"] == f"grafana/grafana:{version}"


def test_what_is_mounted_and_copied_is_there() -> None:
    mounted = [
        volume.rpartition(":")[0].rpartition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if volume.startswith("./")
    ]
    mounted = [re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", path) for path in mounted]
    assert len(mounted) >= 6
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
    for servers in ("compose.conf", "canary.conf"):
        named = re.findall(r"server (\w+):8000", (CONFIGS / "nginx" / servers).read_text())
        assert {"vllm"} <= set(named) <= set(SERVICES), servers
    (target,) = targets("vllm")
    assert target == {"targets": ["vllm:8000"], "labels": {"variant": "gac"}}
    assert targets("alertmanager") == [{"targets": ["alertmanager:9093"]}]
    # The blackbox exporter's own port, and the key where it looks for it.
    prometheus = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    (probe,) = [job for job in prometheus["scrape_configs"] if job["job_name"] == "probe"]
    assert probe["relabel_configs"][-1]["replacement"] == "blackbox:9115"
    (secret,) = SERVICES["blackbox"]["secrets"]
    modules = yaml.safe_load((CONFIGS / "prometheus" / "blackbox.yml").read_text())["modules"]
    assert set(modules) == set(probe["params"]["module"])
    key = modules["completion"]["http"]["authorization"]["credentials_file"]
    assert key == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"] == {secret: {"environment": "VLLM_API_KEY"}}
    # Neither vLLM's own port nor Prometheus is open to the outside.
    assert {name for name, service in SERVICES.items() if "ports" in service} == {
        "alertmanager",
        "nginx",
        "grafana",
    }


def test_the_variant_in_a_comment_is_the_other_side_of_the_canary() -> None:
    text = (CONFIGS / "prometheus" / "targets" / "vllm.yml").read_text()
    both = yaml.safe_load(re.sub(r"^# (?=- targets|  labels)", "", text, flags=re.M))
    assert [(entry["targets"], entry["labels"]["variant"]) for entry in both] == [
        (["vllm:8000"], "gac"),
        (["dense:8000"], "dense"),
    ]


def test_no_server_starts_without_a_key() -> None:
    for name in ("vllm", "dense"):
        assert SERVICES[name]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")


def test_no_container_of_ours_runs_as_root_or_gains_rights() -> None:
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", dockerfile(), re.M)
    assert SERVICES["nginx"]["user"].partition(":")[0] != "0"
    for name in ("vllm", "dense", "nginx"):
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


def test_alertmanager_takes_its_file_and_sends_pages_to_whom_they_are_for() -> None:
    file = CONFIGS / "alertmanager" / "alertmanager.yml"
    amtool = program("amtool")
    check = subprocess.run([amtool, "check-config", file], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr
    for severity in ("page", "ticket", "heartbeat"):
        route = [amtool, "config", "routes", "test", f"--config.file={file}"]
        run = subprocess.run([*route, f"severity={severity}"], capture_output=True, text=True)
        assert run.stdout.strip() == severity, run.stderr


def targets(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load(
        (CONFIGS / "prometheus" / "targets" / f"{name}.yml").read_text()
    )
    return loaded


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

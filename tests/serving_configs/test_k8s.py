"""The manifests say the same things to each other, to vLLM and to Prometheus."""

import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.serving_configs.debian import CONFIGS, program
from vllm_gac import __version__

K8S = CONFIGS / "k8s"
KUSTOMIZATION = yaml.safe_load((K8S / "kustomization.yaml").read_text())
MANIFESTS = {name: yaml.safe_load((K8S / name).read_text()) for name in KUSTOMIZATION["resources"]}
DEPLOYMENT = MANIFESTS["deployment.yaml"]["spec"]
POD = DEPLOYMENT["template"]["spec"]
LABELS = DEPLOYMENT["template"]["metadata"]["labels"]
(CONTAINER,) = POD["containers"]
PORTS = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
VALUES = yaml.safe_load((K8S / "production-stack-values.yaml").read_text())
(MODEL,) = VALUES["servingEngineSpec"]["modelSpec"]
KINDS = {
    "Namespace": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}


def test_every_manifest_is_listed_and_of_a_known_kind() -> None:
    others = {"kustomization.yaml", "production-stack-values.yaml"}
    assert {path.name for path in K8S.glob("*.yaml")} - others == set(MANIFESTS)
    found = {manifest["kind"]: manifest["apiVersion"] for manifest in MANIFESTS.values()}
    assert found == KINDS
    assert all(manifest["metadata"]["name"] for manifest in MANIFESTS.values())


def test_what_selects_pods_selects_those_of_the_deployment() -> None:
    selectors = [
        DEPLOYMENT["selector"]["matchLabels"],
        MANIFESTS["service.yaml"]["spec"]["selector"],
        MANIFESTS["disruption-budget.yaml"]["spec"]["selector"]["matchLabels"],
        MANIFESTS["pod-monitor.yaml"]["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= LABELS.items()


def test_ports_are_those_of_the_container() -> None:
    assert PORTS == {"http": 8000}
    (service,) = MANIFESTS["service.yaml"]["spec"]["ports"]
    assert service["targetPort"] in PORTS
    (endpoint,) = MANIFESTS["pod-monitor.yaml"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in PORTS
    assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_for_health(probe: str) -> None:
    got = CONTAINER[probe]["httpGet"]
    assert got["path"] == "/health"
    assert got["port"] in PORTS


def test_a_start_may_take_as_long_everywhere() -> None:
    starts = [CONTAINER["startupProbe"], VALUES["servingEngineSpec"]["startupProbe"]]
    seconds = {start["periodSeconds"] * start["failureThreshold"] for start in starts}
    assert seconds == {900}
    assert DEPLOYMENT["progressDeadlineSeconds"] > 900


def test_the_kill_comes_after_the_drain() -> None:
    drain = config("one-gpu.yaml")["shutdown-timeout"]
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > drain + wait


def test_mounts_have_their_volumes() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    claim = volumes["model"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["model.yaml"]["metadata"]["name"]
    assert CONTAINER["args"][0] in {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}


def test_one_image_of_this_version_everywhere() -> None:
    (image,) = KUSTOMIZATION["images"]
    assert image["name"] == CONTAINER["image"]
    assert image["newTag"] == __version__ == MODEL["tag"]
    assert image["newName"] == MODEL["repository"]


def test_the_served_name_is_the_one_that_scales() -> None:
    for arguments, triggers in (
        (CONTAINER["args"], MANIFESTS["scaled-object.yaml"]["spec"]["triggers"]),
        (MODEL["vllmConfig"]["extraArgs"], MODEL["keda"]["triggers"]),
    ):
        name = arguments[arguments.index("--served-model-name") + 1]
        (trigger,) = triggers
        assert f'model_name="{name}"' in trigger["metadata"]["query"]
        assert float(trigger["metadata"]["threshold"]) > 0


def test_the_scaled_object_scales_the_deployment() -> None:
    spec = MANIFESTS["scaled-object.yaml"]["spec"]
    assert spec["scaleTargetRef"]["name"] == MANIFESTS["deployment.yaml"]["metadata"]["name"]
    assert "replicas" not in DEPLOYMENT
    assert spec["minReplicaCount"] < spec["fallback"]["replicas"] < spec["maxReplicaCount"]


def test_pods_get_the_job_that_rules_and_dashboard_ask_for() -> None:
    job = LABELS[MANIFESTS["pod-monitor.yaml"]["spec"]["jobLabel"]]
    prometheus = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    scrape = prometheus["scrape_configs"][0]
    assert job == scrape["job_name"]
    (endpoint,) = MANIFESTS["pod-monitor.yaml"]["spec"]["podMetricsEndpoints"]
    (relabeling,) = endpoint["metricRelabelings"]
    (wanted,) = scrape["metric_relabel_configs"]
    assert relabeling == {
        "sourceLabels": wanted["source_labels"],
        "regex": wanted["regex"],
        "action": wanted["action"],
    }


def test_the_config_that_is_named_is_in_the_image() -> None:
    dockerfile = (CONFIGS / "Dockerfile").read_text()
    assert "COPY serving_configs/vllm /etc/vllm-gac" in dockerfile
    for arguments in (CONTAINER["args"], MODEL["vllmConfig"]["extraArgs"]):
        named = arguments[arguments.index("--config") + 1]
        assert named.startswith("/etc/vllm-gac/")
        config(named.removeprefix("/etc/vllm-gac/"))


def test_values_do_not_contradict_the_config_they_name() -> None:
    named = config("one-gpu.yaml")
    assert MODEL["vllmConfig"]["maxModelLen"] == named["max-model-len"]
    assert MODEL["vllmConfig"]["enablePrefixCaching"] is named["enable-prefix-caching"]


def test_values_are_of_the_types_that_the_chart_wants() -> None:
    for field, kind in (
        *((name, str) for name in ("name", "repository", "tag", "modelURL", "pvcStorage")),
        *((name, int) for name in ("replicaCount", "requestCPU", "requestGPU")),
        ("requestMemory", str),
    ):
        assert type(MODEL[field]) is kind, field
    assert all(type(argument) is str for argument in MODEL["vllmConfig"]["extraArgs"])


def test_the_rules_for_the_operator_are_the_rules(tmp_path: Any) -> None:
    made = subprocess.run(
        [sys.executable, K8S / "monitoring.py"], capture_output=True, text=True, check=True
    )
    rule, dashboard = yaml.safe_load_all(made.stdout)
    assert rule["kind"] == "PrometheusRule"
    groups = tmp_path / "rules.yml"
    groups.write_text(yaml.safe_dump(rule["spec"]))
    check = subprocess.run([program("promtool"), "check", "rules", groups], capture_output=True)
    assert check.returncode == 0, check.stdout
    committed = CONFIGS / "grafana" / "dashboards" / "vllm-gac.json"
    assert dashboard["data"] == {"vllm-gac.json": committed.read_text()}


def config(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((CONFIGS / "vllm" / name).read_text())
    assert isinstance(loaded, dict)
    return loaded

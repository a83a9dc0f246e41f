"""The manifests say the same things to each other, to vLLM, to Prometheus and to Docker."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_configs.vllm import alive
from tests.serving_configs import production_stack
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
FILL = yaml.safe_load((K8S / "fill-models.yaml").read_text())
FILL_POD = FILL["spec"]["template"]["spec"]
CHART_SCALING = yaml.safe_load((K8S / "production-stack-scaled-object.yaml").read_text())
SCALING = MANIFESTS["scaled-object.yaml"]
UID = 10001
KINDS = {
    "Namespace": "v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}


def test_every_manifest_is_listed_and_of_a_known_kind() -> None:
    others = {
        "kustomization.yaml",
        "fill-models.yaml",
        "production-stack-values.yaml",
        "production-stack-scaled-object.yaml",
    }
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
        MANIFESTS["network-policy.yaml"]["spec"]["podSelector"]["matchLabels"],
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


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe"])
def test_probes_ask_for_health(probe: str) -> None:
    got = CONTAINER[probe]["httpGet"]
    assert got["path"] == "/health"
    assert got["port"] in PORTS


def test_the_probe_that_ends_a_server_asks_it_for_a_token() -> None:
    probe = CONTAINER["livenessProbe"]
    python, script, base, seconds = probe["exec"]["command"]
    assert python == "python3"
    assert (CONFIGS / "vllm" / script.removeprefix("/etc/vllm-gac/")).is_file()
    assert base == f"http://localhost:{PORTS['http']}"
    # /metrics twice, and the request: else a busy server is ended by the time of the probe itself.
    assert probe["timeoutSeconds"] > float(seconds) + 2 * alive.METRICS_TIMEOUT
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert probe["terminationGracePeriodSeconds"] > wait


def test_a_start_may_take_as_long_everywhere() -> None:
    starts = [CONTAINER["startupProbe"], VALUES["servingEngineSpec"]["startupProbe"]]
    seconds = {start["periodSeconds"] * start["failureThreshold"] for start in starts}
    assert seconds == {900}
    assert DEPLOYMENT["progressDeadlineSeconds"] > 900


def test_the_kill_comes_after_the_drain() -> None:
    drain = config("one-gpu.yaml")["shutdown-timeout"]
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > drain + wait


@pytest.mark.parametrize("pod", [POD, FILL_POD], ids=["server", "fill"])
def test_mounts_have_their_volumes(pod: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["models.yaml"]["metadata"]["name"]


def test_the_model_that_is_served_is_the_one_that_fills_the_volume() -> None:
    (container,) = FILL_POD["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert CONTAINER["args"][0] == f"/models/{env['NAME']}"
    assert MODEL["modelURL"] == f"/data/{env['NAME']}"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/models"}
    assert (
        FILL["metadata"]["name"] not in LABELS.values()
    )  # else the network policy would be for it
    assert container["image"] == f"{MODEL['repository']}:{__version__}"


FAKE_HF = """#!/bin/bash -eu
echo "$@" >> "$LOG"; mkdir -p "${@: -1}"; echo "$FOUND" > "${@: -1}/model"
"""
FAKE_GAC = """#!/bin/bash -eu
echo "$@" >> "$LOG"; [ "$(cat "$2/model")" = sound ]
"""


@pytest.mark.parametrize(("found", "filled"), [("sound", True), ("broken", False)])
def test_the_volume_gets_a_model_that_is_whole_and_gets_it_once(
    found: str, filled: bool, tmp_path: Path
) -> None:
    """The script of the job, run with stand-ins for `hf` and `vllm-gac`."""
    (container,) = FILL_POD["containers"]
    models = tmp_path / "models"
    models.mkdir()
    for name, text in (("hf", FAKE_HF), ("vllm-gac", FAKE_GAC)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (script,) = container["args"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "FOUND": found}
    env |= {"NAME": "gac", "REPOSITORY": "some/model", "REVISION": "abc"}
    for _ in range(2):
        run = subprocess.run(
            [*container["command"], script.replace("/models/", f"{models}/")], env=env
        )
        assert (run.returncode == 0) is filled
    assert (models / "gac").is_dir() is filled
    downloads = (tmp_path / "log").read_text().count("download some/model --revision abc")
    assert downloads == (1 if filled else 2)


@pytest.mark.parametrize(
    ("pod", "container"),
    [(POD, CONTAINER), (FILL_POD, FILL_POD["containers"][0])],
    ids=["server", "fill"],
)
def test_nothing_runs_as_root_or_writes_to_its_image(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == UID
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    written = {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert written >= {"/home/vllm", "/tmp"}
    assert f"useradd --uid {UID} " in dockerfile()
    assert "HOME=/home/vllm" in dockerfile()
    labels = MANIFESTS["namespace.yaml"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_of_the_chart_nothing_runs_as_root_either() -> None:
    engine = VALUES["servingEngineSpec"]
    assert engine["securityContext"].items() <= POD["securityContext"].items()
    assert engine["containerSecurityContext"].items() >= CONTAINER["securityContext"].items()
    assert engine["tolerations"] == POD["tolerations"]
    mounted = {mount["mountPath"] for mount in MODEL["extraVolumeMounts"]}
    assert mounted == {"/home/vllm", "/tmp", "/dev/shm"}


def test_no_server_starts_without_a_key() -> None:
    (key,) = [entry for entry in CONTAINER["env"] if entry["name"] == "VLLM_API_KEY"]
    secret = key["valueFrom"]["secretKeyRef"]
    assert not secret.get("optional")
    chart = VALUES["servingEngineSpec"]["vllmApiKey"]
    assert (secret["name"], secret["key"]) == (chart["secretName"], chart["secretKey"])
    for file in ("kustomization.yaml", "production-stack-values.yaml"):
        create = f"create secret generic {secret['name']}"
        assert create in (K8S / file).read_text()
        assert f"--from-literal={secret['key']}=" in (K8S / file).read_text()


def test_servers_hear_a_front_and_prometheus_and_speak_to_nobody() -> None:
    spec = MANIFESTS["network-policy.yaml"]["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert spec["egress"] == []
    (rule,) = spec["ingress"]
    assert len(rule["from"]) == 2
    assert [port["port"] for port in rule["ports"]] == list(PORTS.values())
    env = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}
    assert env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"


def test_pods_may_go_where_gpus_are() -> None:
    assert "nvidia.com/gpu" in CONTAINER["resources"]["limits"]
    assert any(
        toleration["key"] == "nvidia.com/gpu" and toleration["operator"] == "Exists"
        for toleration in POD["tolerations"]
    )


def test_one_image_of_this_version_everywhere() -> None:
    (image,) = KUSTOMIZATION["images"]
    assert image["name"] == CONTAINER["image"]
    assert image["newTag"] == __version__ == MODEL["tag"]
    assert image["newName"] == MODEL["repository"]


@pytest.mark.parametrize(
    ("arguments", "scaling"),
    [(CONTAINER["args"], SCALING), (MODEL["vllmConfig"]["extraArgs"], CHART_SCALING)],
    ids=["manifests", "chart"],
)
def test_replicas_follow_what_runs_and_waits_under_the_served_name(
    arguments: list[str], scaling: dict[str, Any]
) -> None:
    name = arguments[arguments.index("--served-model-name") + 1]
    (trigger,) = scaling["spec"]["triggers"]
    read = re.findall(r"(vllm:\w+)\{([^}]*)\}", trigger["metadata"]["query"])
    assert [metric for metric, _ in read] == [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ]
    assert all(f'model_name="{name}"' in labels for _, labels in read)
    assert 2 * float(trigger["metadata"]["threshold"]) == config("one-gpu.yaml")["max-num-seqs"]


def test_without_prometheus_replicas_stay_as_they_are() -> None:
    for scaling in (SCALING, CHART_SCALING):
        assert "fallback" not in scaling["spec"]
        (trigger,) = scaling["spec"]["triggers"]
        assert trigger["metadata"]["ignoreNullValues"] == "false"  # KEDA's default is 0 requests


def test_the_query_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": "x", "expr": scaling["spec"]["triggers"][0]["metadata"]["query"]}
        for scaling in (SCALING, CHART_SCALING)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "scaling", "rules": rules}]}))
    check = subprocess.run([program("promtool"), "check", "rules", path], capture_output=True)
    assert check.returncode == 0, check.stderr


def test_the_scaled_objects_scale_their_deployments_in_the_same_way() -> None:
    assert (
        SCALING["spec"]["scaleTargetRef"]["name"]
        == (MANIFESTS["deployment.yaml"]["metadata"]["name"])
    )
    assert "replicas" not in DEPLOYMENT
    target = CHART_SCALING["spec"]["scaleTargetRef"]["name"]
    assert target == f"vllm-{MODEL['name']}-deployment-vllm"
    assert _rule(SCALING) == _rule(CHART_SCALING)


def _rule(manifest: dict[str, Any]) -> list[Any]:
    """What of a ScaledObject decides about replicas."""
    spec = manifest["spec"]
    (trigger,) = spec["triggers"]
    return [
        "vllm:num_requests_running" in trigger["metadata"]["query"],
        trigger["metadata"]["threshold"],
        spec["minReplicaCount"],
        spec["maxReplicaCount"],
        spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        spec.get("fallback"),
    ]


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


def test_values_fit_the_chart_that_is_named() -> None:
    text = (K8S / "production-stack-values.yaml").read_text()
    assert f"vllm/vllm-stack --version {production_stack.VERSION} -f" in text
    assert production_stack.faults(VALUES) == []
    assert "keda" not in MODEL


def test_what_does_not_fit_the_chart_is_noticed() -> None:
    wrong = {
        "servingEngineSpec": {
            "modelSpec": [{"requestCPU": "8", "keda": {"triggers": []}, "gpus": 1}]
        },
        "routerSpec": {"routingLogic": "random"},
    }
    assert [fault.partition(":")[0] for fault in production_stack.faults(wrong)] == [
        "servingEngineSpec.modelSpec[].requestCPU",
        "servingEngineSpec.modelSpec[].keda.triggers",
        "servingEngineSpec.modelSpec[].gpus",
        "routerSpec.routingLogic",
    ]


def test_values_pass_the_charts_own_schema() -> None:
    schema = production_stack.chart_schema()
    if schema is None:
        pytest.skip("needs the chart; production-stack-values.yaml says how to get it")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(VALUES, schema)


def test_values_do_not_contradict_the_config_they_name() -> None:
    named = config("one-gpu.yaml")
    assert MODEL["vllmConfig"]["maxModelLen"] == named["max-model-len"]
    assert MODEL["vllmConfig"]["enablePrefixCaching"] is named["enable-prefix-caching"]


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


FAKE_DOCKER = """#!/bin/bash
[[ "$4" == *prom/prometheus* && "$FAIL" ]] && { echo "no such host" >&2; exit 1; }
echo "sha256:$(echo -n "$4" | sha256sum | cut -d' ' -f1)"
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A copy of the configs, and beside it a `docker` that knows a digest of every image."""
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "docker").write_text(FAKE_DOCKER)
    (tmp_path / "docker").chmod(0o755)
    return tmp_path


def pin(directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, directory / "configs" / "pin_images.py"],
        env={"PATH": f"{directory}:/usr/bin:/bin", "FAIL": "", **env},
        capture_output=True,
        text=True,
    )


def test_images_get_their_digests(docker: Path) -> None:
    run = pin(docker)
    assert run.returncode == 0, run.stderr
    configs = docker / "configs"
    compose = yaml.safe_load((configs / "docker-compose.yml").read_text())["services"]
    images = {name: service["image"] for name, service in compose.items()}
    assert images.pop("vllm") == images.pop("dense") == f"vllm-gac:{__version__}"
    images["base"] = re.findall(r"^FROM (.+)$", (configs / "Dockerfile").read_text(), re.M)[0]
    fill = yaml.safe_load((configs / "k8s" / "fill-models.yaml").read_text())
    images["fill"] = fill["spec"]["template"]["spec"]["containers"][0]["image"]
    values = yaml.safe_load((configs / "k8s" / "production-stack-values.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    images["chart"] = f"{model['repository']}:{model['tag']}"
    for image in images.values():
        name, _, digest = image.partition("@sha256:")
        assert digest == hashlib.sha256(name.encode()).hexdigest(), image
        assert f"{name} is sha256:{digest}" in run.stdout
    (kustomized,) = yaml.safe_load((configs / "k8s" / "kustomization.yaml").read_text())["images"]
    assert kustomized["digest"] == "sha256:" + images["fill"].partition("@sha256:")[2]
    assert "newTag" not in kustomized
    # Once more: nothing is left to pin.
    assert pin(docker).stdout == ""


def test_a_registry_that_does_not_answer_changes_nothing(docker: Path) -> None:
    run = pin(docker, FAIL="1")
    assert run.returncode == 1
    assert run.stderr == "prom/prometheus:v3.5.0: no digest (no such host); nothing was changed\n"
    for name in ("Dockerfile", "docker-compose.yml", "k8s/kustomization.yaml"):
        assert (docker / "configs" / name).read_text() == (CONFIGS / name).read_text()


def dockerfile() -> str:
    return (CONFIGS / "Dockerfile").read_text()


def config(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((CONFIGS / "vllm" / name).read_text())
    assert isinstance(loaded, dict)
    return loaded

"""What the production-stack chart says about its values, as far as our values use it.

Not the schema: names and types of helm/values.schema.json in the repository vllm-project/
production-stack, as read there at commit 01eaf92cb895ececa44ee86083f11522adafbbc9, and of
helm/templates/scaledobject-vllm.yaml. The published chart cannot be had from a package registry.
Where somebody unpacked it, `chart_schema` has the schema itself.
"""

import json
from typing import Any

from tests.serving_configs.debian import ROOT

VERSION = "0.1.13"  # in the index of the chart's repository since 2026-09-29
UNPACKED = ROOT / "build" / "chart" / "vllm-stack" / "values.schema.json"

# A path of keys, [] for an item of a list: the JSON types that the schema allows there. What lies
# below an `object` or `array` that ends a path is not described by it.
TYPES = {
    "servingEngineSpec.runtimeClassName": {"string"},
    "servingEngineSpec.vllmApiKey.secretName": {"string"},
    "servingEngineSpec.vllmApiKey.secretKey": {"string"},
    "servingEngineSpec.securityContext": {"object"},
    "servingEngineSpec.containerSecurityContext": {"object"},
    "servingEngineSpec.tolerations": {"array"},
    "servingEngineSpec.modelSpec[].name": {"string"},
    "servingEngineSpec.modelSpec[].repository": {"string"},
    "servingEngineSpec.modelSpec[].tag": {"string"},
    "servingEngineSpec.modelSpec[].modelURL": {"string"},
    "servingEngineSpec.modelSpec[].replicaCount": {"integer"},
    "servingEngineSpec.modelSpec[].requestCPU": {"integer"},
    "servingEngineSpec.modelSpec[].requestMemory": {"string"},
    "servingEngineSpec.modelSpec[].requestGPU": {"integer", "number", "string"},
    "servingEngineSpec.modelSpec[].pvcStorage": {"string"},
    "servingEngineSpec.modelSpec[].pvcAccessMode[]": {"string"},
    "servingEngineSpec.modelSpec[].vllmConfig.enablePrefixCaching": {"boolean"},
    "servingEngineSpec.modelSpec[].vllmConfig.maxModelLen": {"integer"},
    "servingEngineSpec.modelSpec[].vllmConfig.extraArgs[]": {"string"},
    "servingEngineSpec.modelSpec[].extraVolumes": {"array"},
    "servingEngineSpec.modelSpec[].extraVolumeMounts": {"array"},
    # An object, although the chart's template writes it where KEDA wants a list.
    "servingEngineSpec.modelSpec[].keda.triggers": {"object"},
    "servingEngineSpec.startupProbe.initialDelaySeconds": {"integer"},
    "servingEngineSpec.startupProbe.periodSeconds": {"integer"},
    "servingEngineSpec.startupProbe.failureThreshold": {"integer"},
    "servingEngineSpec.startupProbe.httpGet.path": {"string"},
    "servingEngineSpec.startupProbe.httpGet.port": {"integer", "string"},
    "routerSpec.enableRouter": {"boolean"},
    "routerSpec.replicaCount": {"integer"},
    "routerSpec.serviceDiscovery": {"string"},
    "routerSpec.routingLogic": {"string"},
    "routerSpec.sessionKey": {"string"},
}
CHOICES = {
    "routerSpec.serviceDiscovery": {"k8s", "static"},
    "routerSpec.routingLogic": {
        "roundrobin",
        "session",
        "prefixaware",
        "kvaware",
        "disaggregated_prefill",
        "disaggregated_prefill_orchestrated",
    },
}
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
JSON_TYPES |= {dict: "object", list: "array"}


def faults(values: Any, path: str = "") -> list[str]:
    """What of `values` the chart does not know, or knows as something else."""
    kind = JSON_TYPES[type(values)]
    if path in TYPES:
        if kind not in TYPES[path]:
            return [f"{path}: expected {' or '.join(sorted(TYPES[path]))}, got {kind}"]
        if values not in CHOICES.get(path, [values]):
            return [f"{path}: expected one of {sorted(CHOICES[path])}, got {values!r}"]
        return []
    if isinstance(values, dict):
        below = [(f"{path}.{key}".lstrip("."), value) for key, value in values.items()]
    elif isinstance(values, list):
        below = [(f"{path}[]", value) for value in values]
    else:
        return [f"{path}: the chart is not known to have it"]
    return [fault for inner, value in below for fault in faults(value, inner)]


def chart_schema() -> Any | None:
    """The chart's own schema, if `helm pull` put it where the values file says."""
    return json.loads(UNPACKED.read_text()) if UNPACKED.is_file() else None

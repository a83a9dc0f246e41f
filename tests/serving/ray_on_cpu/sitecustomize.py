"""Lets vLLM for CPU run under Ray. Python imports this at start if its directory is on PYTHONPATH.

vLLM 0.32 places each Ray worker on a device, but its CPU platform names none. Here it names what
Ray calls a GPU. RAY_OVERRIDE_RESOURCES says how many of these there are. Ray's processes inherit
PYTHONPATH, so they import this, too.
"""

from vllm_gac.serving.plugin import run_after_import


def _name_a_device() -> None:
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


run_after_import("vllm.platforms.cpu", _name_a_device)

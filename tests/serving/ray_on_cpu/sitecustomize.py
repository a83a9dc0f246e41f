"""With this directory on PYTHONPATH, vLLM for CPU runs under Ray: Python imports it at its start.

vLLM 0.32 places a Ray worker on a device, and its CPU platform names none. Here a rank's device is
what Ray calls a GPU, of which there are as many as RAY_OVERRIDE_RESOURCES says. Ray's processes
inherit the environment, and so this.
"""

from vllm_gac.serving.after_import import once_imported


def _name_a_device() -> None:
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


once_imported("vllm.platforms.cpu", _name_a_device)

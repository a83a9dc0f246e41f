"""What the plugin registers, the releases of vLLM it serves with, and what went wrong."""

import re

from vllm_gac.errors import VersionError

BACKENDS = {
    "GAC": "vllm_gac.serving.attention.gpu_backend.GacBackend",
    "GAC_REFERENCE": "vllm_gac.serving.attention.reference_backend.GacReferenceBackend",
}
# The minor releases of vLLM that gac models are served with, and the same for pip.
SUPPORTED = ("0.32", "0.33")
REQUIREMENT = "vllm>=0.32,<0.34"

# Errors by the vLLM module that the step writes to. The config hook and the loader raise them when
# a gac model is requested. Other models are served as usual.
registration_failures: dict[str, str] = {}


def refuse_if_unregistered() -> None:
    """Raise VersionError if a registration step failed. Called when a gac model is requested."""
    if registration_failures:
        errors = "; ".join(f"{module}: {error}" for module, error in registration_failures.items())
        raise VersionError(
            f"vllm-gac could not register with vLLM {installed_version()} ({errors}); "
            f"install {REQUIREMENT}"
        )


def installed_version() -> str:
    """The version of the vLLM that this process runs, as vLLM says it."""
    import vllm

    return str(vllm.__version__)


def is_supported(version: str) -> bool:
    """Whether a version of vLLM, such as 0.33.0+cpu, is one that gac models are served with."""
    release = re.match(r"\d+\.\d+(?!\d)", version)
    return release is not None and release[0] in SUPPORTED

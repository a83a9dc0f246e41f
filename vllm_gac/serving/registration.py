"""The names that the plugin registers, and the errors that occurred while it registered them."""

from vllm_gac.errors import VersionError

BACKENDS = {
    "GAC": "vllm_gac.serving.attention.gpu_backend.GacBackend",
    "GAC_REFERENCE": "vllm_gac.serving.attention.reference_backend.GacReferenceBackend",
}
SUPPORTED = "0.32."

# Errors by the vLLM module that the step writes to. The config hook and the loader raise them when
# a gac model is requested. Other models are served as usual.
registration_failures: dict[str, str] = {}


def refuse_if_unregistered() -> None:
    """Raise VersionError if a registration step failed. Called when a gac model is requested."""
    if not registration_failures:
        return
    import vllm

    errors = "; ".join(f"{module}: {error}" for module, error in registration_failures.items())
    raise VersionError(
        f"vllm-gac could not register with vLLM {vllm.__version__} ({errors}); "
        f"install vllm=={SUPPORTED}*, the version this release is made for"
    )

"""What the plugin registers, by name, and what of it could not be registered."""

from vllm_gac.errors import VersionError

BACKENDS = {
    "GAC": "vllm_gac.serving.attention.gpu_backend.GacBackend",
    "GAC_REFERENCE": "vllm_gac.serving.attention.reference_backend.GacReferenceBackend",
}
SUPPORTED = "0.32."

# By the module of vLLM that was written to. The config hook and the loader raise it once a gac
# model is asked for; until then vLLM serves every other model undisturbed.
failures: dict[str, str] = {}


def refuse_if_unregistered() -> None:
    """Raise VersionError if a step of registration failed. Called when a gac model is asked for."""
    if not failures:
        return
    import vllm

    what = "; ".join(f"{module}: {error}" for module, error in failures.items())
    raise VersionError(
        f"vllm-gac could not register with vLLM {vllm.__version__} ({what}); "
        f"install vllm=={SUPPORTED}*, the version this release is made for"
    )

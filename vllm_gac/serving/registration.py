"""What the plugin registers, the releases of vLLM it serves with, and what went wrong."""

import re
from typing import TYPE_CHECKING, Any

from vllm_gac.errors import VersionError
from vllm_gac.layout.families import ARCHITECTURE

if TYPE_CHECKING:
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

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
    """Raise VersionError if vLLM is none that we serve with, or if a registration step failed.

    Called when a gac model is requested.
    """
    version = installed_version()
    if not is_supported(version):
        raise VersionError(
            f"vLLM {version} is installed, but this release of vllm-gac serves gac models with "
            f"{REQUIREMENT} only; install one of these, or a release of vllm-gac for vLLM {version}"
        )
    if registration_failures:
        errors = "; ".join(f"{module}: {error}" for module, error in registration_failures.items())
        raise VersionError(
            f"vllm-gac could not register with vLLM {version} ({errors}); install {REQUIREMENT}"
        )


def installed_version() -> str:
    """The version of the vLLM that this process runs, as vLLM says it."""
    import vllm

    return str(vllm.__version__)


def is_supported(version: str) -> bool:
    """Whether a version of vLLM, such as 0.33.0+cpu, is one that gac models are served with."""
    release = re.match(r"\d+\.\d+(?!\d)", version)
    return release is not None and release[0] in SUPPORTED


class RefusingConfigParser:
    """Stands in for our config parser where vLLM is none that we serve with.

    Our own parser imports names of vLLM that other releases may not have. This one imports none:
    gac models get a VersionError, and other models are parsed as without the plugin.
    """

    def __init__(self, before: "type[ConfigParserBase]") -> None:
        self.before = before

    def parse(self, model: object, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        """What vLLM's own parser returns. Raises VersionError for a gac model."""
        raw, config = self.before().parse(model, *args, **kwargs)
        if "gac" in raw or ARCHITECTURE in (raw.get("architectures") or ()):
            refuse_if_unregistered()
        return raw, config

"""Compress LLMs to dimensions that GPUs like, and serve them with vLLM.

The names in `__all__` are the public API, together with the errors in `vllm_gac.errors`.
Everything else in this package is internal and may change without notice.

    calibrate         measure statistics of a dense model on text
    plan              choose the dims of every layer for the budgets of a PlanRequest
    compress          make a dense model smaller
    heal              train a compressed model to predict what the dense one predicts
    import_model      convert a model that another compression tool wrote
    repair            pad the dims of a compressed model to dims that kernels like
    ...Request        the options of calibrate, compress, heal, import_model and repair
    inspect, verify   describe a model directory; find the reasons not to serve it
    evaluate          perplexity on text
    compare           the ratio of two models' perplexities, with its interval
    GacConfig         the config of a compressed model in transformers
    open_checkpoint   read the config, the layout (ModelLayout) and the tensors of a directory

`import vllm_gac` imports neither torch nor pydantic nor vllm, so that the command line and vLLM's
plugin discovery start fast: a public name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_gac.checkpoint.open import open_checkpoint as open_checkpoint
    from vllm_gac.layout.dims import ModelLayout as ModelLayout
    from vllm_gac.planning.planner import plan as plan
    from vllm_gac.planning.request import PlanRequest as PlanRequest
    from vllm_gac.serving.gac_config import GacConfig as GacConfig
    from vllm_gac.steps.calibrate.calibrate import calibrate as calibrate
    from vllm_gac.steps.calibrate.request import CalibrateRequest as CalibrateRequest
    from vllm_gac.steps.compress.compress import compress as compress
    from vllm_gac.steps.compress.request import CompressRequest as CompressRequest
    from vllm_gac.steps.convert.export import export as export
    from vllm_gac.steps.convert.import_model import import_model as import_model
    from vllm_gac.steps.convert.request import ImportRequest as ImportRequest
    from vllm_gac.steps.evaluate.compare import compare as compare
    from vllm_gac.steps.evaluate.perplexity import evaluate as evaluate
    from vllm_gac.steps.heal.heal import heal as heal
    from vllm_gac.steps.heal.request import HealRequest as HealRequest
    from vllm_gac.steps.inspect import inspect as inspect
    from vllm_gac.steps.repair.repair import repair as repair
    from vllm_gac.steps.repair.request import RepairRequest as RepairRequest
    from vllm_gac.steps.verify import verify as verify

    __version__: str

_MODULES = {
    "CalibrateRequest": "vllm_gac.steps.calibrate.request",
    "CompressRequest": "vllm_gac.steps.compress.request",
    "GacConfig": "vllm_gac.serving.gac_config",
    "HealRequest": "vllm_gac.steps.heal.request",
    "ImportRequest": "vllm_gac.steps.convert.request",
    "ModelLayout": "vllm_gac.layout.dims",
    "PlanRequest": "vllm_gac.planning.request",
    "RepairRequest": "vllm_gac.steps.repair.request",
    "calibrate": "vllm_gac.steps.calibrate.calibrate",
    "compare": "vllm_gac.steps.evaluate.compare",
    "compress": "vllm_gac.steps.compress.compress",
    "evaluate": "vllm_gac.steps.evaluate.perplexity",
    "export": "vllm_gac.steps.convert.export",
    "heal": "vllm_gac.steps.heal.heal",
    "import_model": "vllm_gac.steps.convert.import_model",
    "inspect": "vllm_gac.steps.inspect",
    "open_checkpoint": "vllm_gac.checkpoint.open",
    "plan": "vllm_gac.planning.planner",
    "repair": "vllm_gac.steps.repair.repair",
    "verify": "vllm_gac.steps.verify",
}
__all__ = [*_MODULES]

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("vllm_gac.version").version()
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

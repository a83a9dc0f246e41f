"""Runs in the front-end process, before any worker: is this gac model one we can serve?"""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.layout import LayerLayout, ModelLayout
from vllm_gac.registration import LOAD_FORMAT, refuse_if_unregistered
from vllm_gac.serving.align import align_config
from vllm_gac.serving.hf_layout import layout_of_hf, stored_layout
from vllm_gac.serving.preflight import preflight

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# Load formats under which vLLM would read a gac directory without our checks.
_LOOSE_FORMATS = ("auto", "hf", "safetensors")


class GacConfigHook:
    """Hook of GacLlamaForCausalLM in vLLM's MODELS_CONFIG_MAP.

    Has the methods of vLLM's VerifyAndUpdateConfig but does not import it: this module may be
    imported first by the step that waits for that very import (`vllm_gac.deferred`).
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        """Parse the layout, so that a bad config.json fails before anything is started."""
        refuse_if_unregistered()
        layout_of_hf(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        """Load strictly by default, pad dims, and check them against the parallel config.

        The headers of a local directory are checked here already, before a GPU is touched.
        """
        model_config, load_config = vllm_config.model_config, vllm_config.load_config
        if load_config.load_format in _LOOSE_FORMATS:
            logger.info("Loading a gac model with --load-format %s", LOAD_FORMAT)
            load_config.load_format = LOAD_FORMAT
        if load_config.load_format == LOAD_FORMAT:
            _preflight(Path(model_config.model), vllm_config)
            align_config(vllm_config)
        layout = layout_of_hf(model_config.hf_config)
        check_tensor_parallel(layout, vllm_config.parallel_config.tensor_parallel_size)


def _preflight(directory: Path, vllm_config: "VllmConfig") -> None:
    """Check a directory's headers, unless there is nothing to load or a quantizer packed it."""
    dummy = vllm_config.load_config.model_loader_extra_config.get("weights") == "dummy"
    hf_config = vllm_config.model_config.hf_config
    packed = getattr(hf_config, "quantization_config", None) is not None
    if directory.is_dir() and not dummy and not packed:
        preflight(directory, stored_layout(hf_config))


def check_tensor_parallel(layout: ModelLayout, tp: int) -> None:
    """Raise CheckpointError naming the first layer whose dims `tp` ranks cannot share evenly."""
    for index, layer in enumerate(layout.layers):
        for what, dim in _sharded_dims(layer):
            if dim % tp:
                fits = max(n for n in range(1, tp + 1) if dim % n == 0)
                raise CheckpointError(
                    f"layer {index} has {what} = {dim}, which --tensor-parallel-size {tp} does not "
                    f"divide; use a size that divides it (at most {fits} of those up to {tp})"
                )


def _sharded_dims(layer: LayerLayout) -> tuple[tuple[str, int], ...]:
    return (
        ("query heads", layer.query_heads),
        ("key heads", layer.key.heads),
        ("value heads", layer.value.heads),
        ("intermediate_size", layer.intermediate_size),
    )

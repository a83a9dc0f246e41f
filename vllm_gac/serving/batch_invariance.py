"""Whether answers may depend on what else is in a batch: decided in the front-end process."""

from vllm import envs
from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError


def check_batch_invariance() -> None:
    """Raise CheckpointError if VLLM_BATCH_INVARIANT is set: on a GPU we cannot keep it.

    vLLM asks the backends it chooses itself; ours is named by the layer.
    """
    if envs.VLLM_BATCH_INVARIANT and current_platform.is_cuda():
        raise CheckpointError(
            "VLLM_BATCH_INVARIANT is 1; the attention of a gac model is split by all that is in a "
            "batch, so its answers differ in the last bits; unset it"
        )

"""How many drafted tokens a step may verify: decided in the front-end process."""

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Query tokens of a request that the decode kernel takes: one, or those of a speculation.
MAX_DECODE_QUERY = 8


def check_speculation(vllm_config: "VllmConfig") -> None:
    """Raise CheckpointError if more tokens are drafted than the GPU's decode kernel verifies.

    vLLM captures the verifying steps of any length in full graphs, in which only that kernel is
    right.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not current_platform.is_cuda():
        return
    most, asked = MAX_DECODE_QUERY - 1, speculative.num_speculative_tokens
    if asked > most:
        raise CheckpointError(
            f"--speculative-config: num_speculative_tokens is {asked}; of a gac model one step "
            f"verifies at most {most} drafted tokens; use {most} or fewer"
        )

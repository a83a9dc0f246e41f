"""How a plan's dims become weights, and on how much text."""

from dataclasses import dataclass, field

from vllm_gac.errors import CheckpointError
from vllm_gac.options import option, refuse_unexpected
from vllm_gac.steps.calibrate.request import MAX_TOKENS, SEQUENCE_LENGTH


@dataclass(frozen=True, slots=True)
class CompressRequest:
    """How a plan's dims become weights, and on how much text.

    Each field is an option of `vllm-gac compress`; what to plan for is a `PlanRequest`.

    Raises:
        CheckpointError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.CompressRequest(max_tokens=16384, no_refit=True)
        >>> request.sequence_length
        512
    """

    no_refit: bool = field(
        default=False,
        metadata=option(
            "--no-refit",
            "leave each layer as it is fitted to the dense model's inputs; by default o_proj and "
            "down_proj are fitted once more, to what the compressed layers before give",
            kind="switch",
        ),
    )
    max_tokens: int | None = field(default=None, metadata=MAX_TOKENS)
    sequence_length: int = field(default=512, metadata=SEQUENCE_LENGTH)

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no compression can be asked for."""
        refuse_unexpected(self, CheckpointError, by_flag=True)

"""On how much text dims become weights."""

from dataclasses import dataclass, field

from vllm_gac.errors import CheckpointError
from vllm_gac.options import option, refuse_unexpected
from vllm_gac.steps.calibrate.request import MAX_TOKENS, SEQUENCE_LENGTH


@dataclass(frozen=True, slots=True)
class CompressRequest:
    """On how much text a plan's dims become weights.

    Each field is an option of `vllm-gac compress`; what to plan for is a `PlanRequest`.

    Raises:
        CheckpointError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.CompressRequest(max_tokens=16384)
        >>> request.sequence_length
        512
    """

    max_tokens: int | None = field(default=None, metadata=MAX_TOKENS)
    sequence_length: int = field(default=512, metadata=SEQUENCE_LENGTH)
    score: str | None = field(
        default=None,
        metadata=option(
            "--score",
            "instead of --held-out: run as COMMAND MODEL_DIR, it prints a score on its last line, "
            "more is better; --max-loss is how far below the dense model's it may fall",
            metavar="COMMAND",
            group="first",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no compression can be asked for."""
        refuse_unexpected(self, CheckpointError)

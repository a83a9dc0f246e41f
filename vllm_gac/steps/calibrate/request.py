"""What a calibration measures, and on how much text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_gac.compression.methods.registry import METHODS
from vllm_gac.errors import CheckpointError
from vllm_gac.options import option, refuse_unexpected

# How much text statistics are measured on; `compress`, which measures them itself, has it, too.
MAX_TOKENS = option(
    "--max-tokens",
    "use at most N tokens, in whole sequences, one at least; default: 65536, or 16 for each "
    "channel of an MLP if that is more",
    kind="count",
    group="run",
)
SEQUENCE_LENGTH = option(
    "--sequence-length", "tokens per sequence; default: 512", kind="count", group="run"
)


@dataclass(frozen=True, slots=True)
class CalibrateRequest:
    """What a calibration measures, and on how much text.

    Each field is an option of `vllm-gac calibrate`. Sequences are no longer than the model's
    context.

    Raises:
        CheckpointError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.CalibrateRequest(methods=("heads", "prune"), max_tokens=16384)
        >>> request.methods, request.sequence_length
        (('heads', 'prune'), 512)
    """

    methods: Sequence[str] = field(
        default=tuple(METHODS),
        metadata=option(
            "--method",
            f"what plans will be made of: {', '.join(METHODS)}; default: all, of which lowrank "
            "takes longest",
            kind="names",
            choices=METHODS,
        ),
    )
    max_tokens: int | None = field(default=None, metadata=MAX_TOKENS)
    sequence_length: int = field(default=512, metadata=SEQUENCE_LENGTH)

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no calibration can be asked for."""
        refuse_unexpected(self, CheckpointError)

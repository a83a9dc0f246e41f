"""How an import stores weights."""

from dataclasses import dataclass, field
from typing import get_args

from vllm_gac.checkpoint.dtypes import WeightDtype
from vllm_gac.errors import CheckpointError
from vllm_gac.options import option, refuse_unexpected


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """How an import stores weights.

    Its field is an option of `vllm-gac import`. Without a `dtype`, weights keep that of the
    matrices, or become float32 if they differ.

    Raises:
        CheckpointError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> vllm_gac.ImportRequest(dtype="bfloat16").dtype
        'bfloat16'
    """

    dtype: WeightDtype | None = field(
        default=None,
        metadata=option(
            "--dtype",
            "how to store weights; default: as they are, the widest of them if they differ",
            choices=get_args(WeightDtype),
        ),
    )

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no import can be asked for."""
        refuse_unexpected(self, CheckpointError)

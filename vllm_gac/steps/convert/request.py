"""Which format an import takes, and how weights are stored."""

from dataclasses import dataclass, field
from typing import get_args

from vllm_gac.checkpoint.dtypes import WeightDtype
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.options import option, refuse_unexpected


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Which format an import takes, and how weights are stored.

    Each field is an option of `vllm-gac import`. Without a `dtype`, weights keep that of the
    matrices, or become float32 if they differ.

    Raises:
        CheckpointError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> vllm_gac.ImportRequest(dtype="bfloat16").format
        'auto'
    """

    format: str = field(
        default="auto",
        metadata=option(
            "--format",
            "refuse what is not in this format: svd-llm, palu, asvd, hf-pruned and others; "
            "default: auto, any of them",
            metavar="FORMAT",
        ),
    )
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
        refuse_unexpected(self, CheckpointError, by_flag=True)
        if self.format == "auto":
            return
        from vllm_gac.importers.imported import Format  # takes too long for every --help

        known = sorted(set(get_args(Format)) - {"gac", "dense"})
        if self.format not in known:
            listed = ", ".join(["auto", *known])
            raise CheckpointError(f"--format {sanitize(self.format)}: expected one of {listed}")

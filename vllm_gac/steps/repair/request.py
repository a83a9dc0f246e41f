"""Which dims a repair may leave."""

from dataclasses import dataclass, field

from vllm_gac.alignment.rules import (
    LINEAR_MULTIPLES,
    STRATEGIES,
    QuantizationMultiples,
    quantized_as,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.schema import Strategy
from vllm_gac.options import option, refuse_unexpected


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """Which dims a repair may leave: each field is an option of `vllm-gac repair`.

    A strategy is "minimal" (multiples of 8), "measured" (the fastest ranks and widths nearby by the
    profile of `gpu`), or "none" (every dim).

    Raises:
        CheckpointError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.RepairRequest(strategy="measured", quantization="fp8_per_block")
        >>> request.multiples.linear
        128
    """

    strategy: Strategy = field(
        default="minimal",
        metadata=option(
            "--strategy",
            "minimal: multiples of 8 (default); measured: the fastest ranks and widths nearby, by "
            "the GPU's profile; none: every dim",
            choices=STRATEGIES,
        ),
    )
    gpu: str | None = field(
        default=None,
        metadata=option(
            "--gpu",
            "profile for measured and for predicted times: h100, h200, or a profile.json",
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=option(
            "--tensor-parallel-size --tp -tp",
            "align each of N parts of an MLP width (1)",
            kind="count",
        ),
    )
    quantization: str | None = field(
        default=None,
        metadata=option(
            "--quantization",
            "pad linears to what quantizing them so will ask for, too; vLLM's names",
            choices=sorted(LINEAR_MULTIPLES),
        ),
    )

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no repair can be asked for."""
        refuse_unexpected(self, CheckpointError)

    @property
    def multiples(self) -> QuantizationMultiples:
        """What the quantization asks for."""
        return quantized_as(self.quantization)

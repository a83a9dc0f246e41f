"""What was measured of a compressed model beside the dense one, as its config.json says it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from vllm_gac.layout.schema import Count, StrictModel

_Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Measurement(StrictModel):
    """A comparison (evaluate/compare.py) on text that was set aside: `gac.source.measured`."""

    ratio: _Positive
    interval: Annotated[list[_Positive], Field(min_length=2, max_length=2)] | None
    divergence: _Positive
    agreement: Annotated[float, Field(ge=0, le=1)]
    tokens: Count

    @classmethod
    def of(cls, source: Mapping[str, Any]) -> "Measurement | None":
        """What `gac.source` has of it; anybody may have written there."""
        try:
            return cls.model_validate(source.get("measured"))
        except ValidationError:
            return None

    def __str__(self) -> str:
        interval = "too little text for an interval"
        if self.interval is not None:
            interval = "95 %: {:.4f} to {:.4f}".format(*self.interval)
        return (
            f"{self.ratio:.4f} times the dense model's perplexity ({interval}), "
            f"{self.divergence:.4f} nats per token of divergence, the same first choice for "
            f"{self.agreement:.1%} of {self.tokens:,} tokens"
        )

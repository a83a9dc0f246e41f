"""What a healing trains, and how."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vllm_gac.errors import HealingError
from vllm_gac.options import option, refuse_unexpected

Train: TypeAlias = Literal["auto", "full", "lora"]


@dataclass(frozen=True, slots=True)
class HealRequest:
    """What a healing trains, and how: each field is an option of `vllm-gac heal`.

    None, where it is the default, leaves the choice to the run: all tokens of the text once; a
    learning rate that suits the size of the dense model's weights; adapters of rank 32; and a 256th
    of the tokens in each step.

    Raises:
        HealingError: A value is not allowed.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.HealRequest(tokens=1_000_000, train="lora")
        >>> request.sequence_length, request.lora_rank is None
        (512, True)
    """

    tokens: int | None = field(
        default=None,
        metadata=option(
            "--tokens",
            "train on N tokens, in several passes if the text has fewer; default: the text once",
            kind="count",
        ),
    )
    learning_rate: float | None = field(
        default=None,
        metadata=option(
            "--learning-rate",
            "the highest one; default: by the size of the dense model's weights",
            kind="number",
            metavar="R",
            minimum=1e-12,
            maximum=1e6,
        ),
    )
    train: Train = field(
        default="auto",
        metadata=option(
            "--train",
            "all weights of the layers, or adapters that are merged in the end; default: all if "
            "the GPU has room for them",
            choices=("auto", "full", "lora"),
        ),
    )
    lora_rank: int | None = field(
        default=None,
        metadata=option(
            "--lora-rank", "the rank of the adapters; default: 32", kind="count", maximum=10**6
        ),
    )
    batch_tokens: int | None = field(
        default=None,
        metadata=option(
            "--batch-tokens",
            "tokens of one step, at most all; default: a 256th of all, from 2048 to 65536",
            kind="count",
        ),
    )
    sequence_length: int = field(
        default=512,
        metadata=option("--sequence-length", "tokens per sequence; default: 512", kind="count"),
    )

    def __post_init__(self) -> None:
        """Refuse, by its flag, what no healing can be asked for."""
        refuse_unexpected(self, HealingError)
        if self.train == "full" and self.lora_rank is not None:
            raise HealingError("--lora-rank has no effect with --train full")

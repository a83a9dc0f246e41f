"""How much text a model writes, and how it is sampled."""

from dataclasses import dataclass, field

from vllm_gac.errors import CheckpointError
from vllm_gac.options import option, refuse_unexpected

# Without prompts.
DEFAULT_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """How much text a model writes, and how it is sampled.

    Each field is an option of `vllm-gac generate`.

    Raises:
        CheckpointError: A value is not allowed.
    """

    tokens: int | None = field(
        default=None,
        metadata=option(
            "--tokens",
            "stop after about N tokens of text; default: one answer to each prompt, or "
            f"{DEFAULT_TOKENS} tokens without prompts",
            kind="count",
        ),
    )
    max_new_tokens: int = field(
        default=1024,
        metadata=option(
            "--max-new-tokens",
            "of one answer; longer ones are left out; default: 1024",
            kind="count",
        ),
    )
    temperature: float = field(
        default=0.8,
        metadata=option(
            "--temperature",
            "of sampling, from the likeliest 95 %%; default: 0.8",
            kind="number",
            minimum=0.01,
            maximum=2,
        ),
    )
    seed: int = field(
        default=0,
        metadata=option(
            "--seed",
            "of sampling; another one gives other text; default: 0",
            kind="count",
            minimum=0,
            maximum=2**31 - 1,
        ),
    )

    def __post_init__(self) -> None:
        """Refuse, by its flag, what cannot be asked for."""
        refuse_unexpected(self, CheckpointError)

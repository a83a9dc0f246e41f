"""Heal each model that is tried for a loss, before it is measured."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import CheckpointError, HealingError, NotHealedError
from vllm_gac.steps.heal.heal import heal
from vllm_gac.steps.heal.request import HealRequest
from vllm_gac.texts.token_text import calibration_sequences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealingTries:
    """How the models that are tried for a loss are healed.

    Attributes:
        dense: Their dense model, which is the teacher.
        texts: What they are trained on. Some of it is set aside, to choose the best weights by.
        tokens: How many tokens each of them is trained on.
        sequence_length: Tokens of one sequence; at most the model's context.
        device: The torch device to compute on.
        progress: Whether to show progress bars on stderr.
    """

    dense: Checkpoint
    texts: Sequence[Path]
    tokens: int
    sequence_length: int
    device: str
    progress: bool

    def check(self) -> None:
        """Refuse, before any work, what no model could be healed with.

        Raises:
            HealingError: There are too few tokens to train on.
            CheckpointError: The text is too short.
        """
        length = min(self.sequence_length, self.dense.config.max_position_embeddings)
        if self.tokens < length:
            raise HealingError(
                f"--heal-tokens {self.tokens}: a step trains on a whole sequence of {length} "
                f"tokens; give {length} or more"
            )
        sequences = calibration_sequences(
            self.dense.directory, self.texts, length=length, max_tokens=2 * length
        )
        if len(sequences) < 2:
            raise CheckpointError(
                f"{', '.join(map(str, self.texts))}: one sequence of {length} tokens; --heal needs "
                "one to train on and one to choose the best weights by: give more text"
            )

    def heal(self, model: Path, healed: Path) -> bool:
        """Heal `model` into the directory `healed`, or go on with that after a stop.

        Returns:
            Whether the model has become better; if not, nothing is written.
        """
        try:
            heal(
                model,
                self.dense.directory,
                self.texts,
                healed,
                HealRequest(tokens=self.tokens, sequence_length=self.sequence_length),
                device=self.device,
                resume=True,
                progress=self.progress,
            )
        except NotHealedError as e:
            logger.warning("is measured as it was compressed: %s", e)
            return False
        return True

"""The errors that a user can cause; each message is one line: what, where, and what to do."""

from vllm_gac.errors.sanitize import sentence


class GacError(ValueError):
    """Base of every error whose message is shown to the user as it is.

    The message is one printable line of less than 2 KB, even if it quotes a stranger's file.
    """

    def __init__(self, message: object) -> None:
        super().__init__(sentence(message))


class CheckpointError(GacError):
    """A model directory is missing something, holds something extra, or is broken."""


class HubError(CheckpointError):
    """A model or a data set cannot be had from the Hugging Face Hub or from its cache."""


class DiskError(CheckpointError):
    """A disk is full, fails, or holds a file that is in the way; the run can go on afterwards."""


class PlanError(GacError):
    """A plan or a budget is malformed or cannot be met."""


class ProfileError(GacError):
    """A GPU profile is missing, malformed, or lacks a measurement that is needed."""


class VersionError(GacError):
    """A file, or the installed vLLM, has a version that this release does not work with."""


class CommandError(GacError):
    """A command that the user gave failed; the run can go on afterwards."""


class HealingError(GacError):
    """Healing cannot be done as asked, or made the model no better."""


class NotHealedError(HealingError):
    """Healing made the model no better; another model, or more text, may do."""

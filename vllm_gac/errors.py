"""The errors a user can cause, each one line: what, where, expected and got, what to do."""

from vllm_gac.shown import sentence


class GacError(ValueError):
    """Base of every error whose message is meant for the user as it stands.

    Whatever of a stranger's text is in it, it is one printable line of less than 2 KB.
    """

    def __init__(self, message: object) -> None:
        super().__init__(sentence(message))


class CheckpointError(GacError):
    """A model directory is missing something, holds something extra, or is broken."""


class DiskError(CheckpointError):
    """A disk is full, fails, or holds what is in the way: once it does not, a run can go on."""


class PlanError(GacError):
    """A plan, a budget or a knapsack problem is malformed or cannot be met."""


class ProfileError(GacError):
    """A GPU profile is missing, malformed or does not cover what was asked."""


class VersionError(GacError):
    """A file was written by a format version this release does not read."""


class ServerError(GacError):
    """A server cannot be reached, or does not answer what it was asked."""

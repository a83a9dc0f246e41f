"""The error of the load tests, printed as one line like every other error of this project."""

from vllm_gac.errors import GacError


class LoadTestError(GacError):
    """A scenario, a schedule or the records of a run are malformed or do not fit together."""

"""`--model-loader-extra-config` of `--load-format gac`."""

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_gac.layout.schema import Strategy, validate

# More threads did not load faster.
_MAX_THREADS = 8


class LoaderOptions(BaseModel):
    """The options of our loader, and those of vLLM's default loader."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # Which dims tensors are padded to (alignment/rules.py). None means the default of
    # serving/config/served_layout.py. `gpu` names the profile for the strategy `measured`.
    align: Strategy | None = None
    gpu: str | None = None
    finite_check: bool = True
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
    # None: on for our reads, off for tensors that vLLM's own loader reads.
    enable_multithread_load: bool | None = None
    num_threads: Annotated[int, Field(ge=1, le=256)] | None = None
    enable_weights_track: bool | None = None

    @property
    def threads(self) -> int:
        """How many threads read tensors."""
        if self.enable_multithread_load is False:
            return 1
        return self.num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def loader_options(extra_config: Any) -> LoaderOptions:
    """The parsed options. Raises CheckpointError, naming an option that is unknown or wrong."""
    return validate(LoaderOptions, extra_config, "--model-loader-extra-config")

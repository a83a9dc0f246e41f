"""`--model-loader-extra-config` of `--load-format gac`."""

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_gac.layout.schema import Strategy, validate

# Where more gained nothing.
_MOST_THREADS = 8


class LoaderOptions(BaseModel):
    """Ours, and those of vLLM's default loader."""

    model_config = ConfigDict(extra="forbid", strict=True)

    # Which dims tensors are padded to (contract.py), None where nothing was said (align.py);
    # `gpu` is the profile for measured.
    align: Strategy | None = None
    gpu: str | None = None
    finite_check: bool = True
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
    # None: on, but off for tensors that vLLM's own loader reads.
    enable_multithread_load: bool | None = None
    num_threads: Annotated[int, Field(ge=1, le=256)] | None = None
    enable_weights_track: bool | None = None

    @property
    def threads(self) -> int:
        """How many threads read tensors."""
        if self.enable_multithread_load is False:
            return 1
        return self.num_threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def loader_options(extra_config: Any) -> LoaderOptions:
    """The options given. Raises CheckpointError naming one that is unknown or wrong."""
    return validate(LoaderOptions, extra_config, "--model-loader-extra-config")

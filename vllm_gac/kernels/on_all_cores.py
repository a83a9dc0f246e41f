"""Compiling kernels on all cores at once.

Triton's compiler releases Python's global lock while it works, so threads are enough. The kernels
are then ready in this process, as if they had been launched.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton.runtime._async_compile import AsyncCompileMode


@contextmanager
def compiling_on_all_cores() -> Iterator[None]:
    """Within the context, kernels that are to be compiled are handed to threads. It waits for all.

    Kernels that this process already has are skipped; those in Triton's cache on disk are read.
    """
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, AsyncCompileMode(threads):
        yield

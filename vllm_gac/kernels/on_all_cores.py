"""Compiling kernels on all cores at once.

Triton's compiler releases Python's global lock while it works, so threads are enough. The kernels
are then ready in this process, as if they had been launched.
"""

import gc
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton.runtime._async_compile import AsyncCompileMode


@contextmanager
def compiling_on_all_cores() -> Iterator[None]:
    """Within the context, kernels that are to be compiled are handed to threads. It waits for all.

    Kernels that this process already has are skipped; those in Triton's cache on disk are read.
    """
    cores = len(os.sched_getaffinity(0))
    with _parsing_in_threads(), ThreadPoolExecutor(cores) as threads, AsyncCompileMode(threads):
        yield


@contextmanager
def _parsing_in_threads() -> Iterator[None]:
    """Within the context, threads may call `ast.parse` at once, as Triton does.

    Before Python 3.11.8, all threads count the depth of their trees in one number (gh-106905).
    Where collecting garbage in the midst of a tree lets another thread begin one, both raise
    SystemError. So nothing is collected meanwhile.
    """
    collected = gc.isenabled()
    if sys.version_info < (3, 11, 8):
        gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()

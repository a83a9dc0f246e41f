"""Kernels are compiled in threads."""

import ast
import gc

from vllm_gac.kernels.on_all_cores import compiling_on_all_cores


def test_a_tree_is_whole_where_another_one_begins_meanwhile() -> None:
    source = "f(" + "1 + x, " * 2000 + ")"  # enough objects for a collection

    def begin_another(*_: object) -> None:
        """As a thread does that goes on while this one collects garbage; its stack is deeper."""
        ast.parse("1")

    gc.callbacks.append(begin_another)
    try:
        with compiling_on_all_cores():
            assert len(ast.parse(source).body) == 1
    finally:
        gc.callbacks.remove(begin_another)
    assert gc.isenabled()

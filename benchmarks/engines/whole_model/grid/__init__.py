"""Compression with FP8 weights and FP8 caches: every form of a model in every precision.

    python -m benchmarks.engines.whole_model.grid run OUT [--gpus 0,1]   # continues what is there
    python -m benchmarks.engines.whole_model.grid report OUT --out PAGE
    python -m benchmarks.engines.whole_model.grid list                    # cells, engine starts

A cell is a model in one precision. One engine serves all batches of a cell, and each batch is a
line of OUT/rows.jsonl as soon as it is timed. The most telling cells come first.

cells.py -> run.py (one engine at a time on each GPU) -> compare.py -> page.py, plot.py
"""

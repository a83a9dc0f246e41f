"""Models of Llama-3-8B's shape in vLLM, with random weights.

    python -m benchmarks.engines.whole_model run OUT [--cells NAMES]   # continues what is there
    python -m benchmarks.engines.whole_model run OUT --two-gpus        # beside one GPU
    python -m benchmarks.engines.whole_model run OUT --free            # dense at 1 to 512 sequences
    python -m benchmarks.engines.whole_model report OUT RESULT.json

A cell is a model in one precision. One engine serves all batches of a cell, and each batch is a
line of OUT/rows.jsonl as soon as it is timed. models.py and cells.py say what is served, serve.py
times it, report.py and two_gpus.py make the result, and predicted.py compares the steps with a
profile.
"""

"""Whole models in vLLM: what compression promises in prefill, decode and room, and what it gives.

    python -m benchmarks.engines.whole_model run RUNS  # on a GPU; resumes what is missing
    python -m benchmarks.engines.whole_model report RUNS... --out OUT
    python -m benchmarks.engines.whole_model run RUNS --shape tiny  # on a CPU: proves the path

models.py -> engine.py (one process a model, one JSON each) -> ideal.py -> report.py, plot.py
"""

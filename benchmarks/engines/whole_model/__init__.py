"""Whole models in vLLM: the gains that compression promises in prefill, decode and room, and gives.

    python -m benchmarks.engines.whole_model run RUNS  # on a GPU; skips models that have a result
    python -m benchmarks.engines.whole_model report RUNS... --out OUT
    python -m benchmarks.engines.whole_model run RUNS --shape tiny  # on a CPU: everything runs

models.py -> engine.py (one process and one JSON file a model) -> ideal.py -> report.py, plot.py.
grid/ serves the models in FP8, too; predicted.py compares engines with what a profile predicts.
"""

"""Tensor parallelism on two GPUs of one host: `python -m benchmarks.engines.parallel OUT`."""

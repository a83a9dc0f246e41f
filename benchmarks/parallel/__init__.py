"""Tensor parallelism on two GPUs of one host: `python -m benchmarks.parallel OUT`."""

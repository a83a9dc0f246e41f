"""Tensor parallelism on two GPUs of one host: see __main__.py."""

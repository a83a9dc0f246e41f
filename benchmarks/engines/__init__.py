"""Benchmarks of whole vLLM engines."""

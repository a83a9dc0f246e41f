"""Benchmarks of kernels, and of the profiles that predict their times."""

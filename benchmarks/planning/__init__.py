"""Benchmarks of the planner."""

"""Turns records of runs into percentiles with confidence intervals, speedups and an HTML page."""

"""Results, a JSON file each, and what makes pages of them: `python -m benchmarks.results`."""

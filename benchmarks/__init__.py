"""Measurements, one command each; their results are committed under results/."""

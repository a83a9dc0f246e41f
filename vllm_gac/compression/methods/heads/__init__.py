"""Merged and smaller key and value heads."""

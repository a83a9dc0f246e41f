"""Predicted times of linear layers, attention and whole decoder layers, from a GPU profile."""

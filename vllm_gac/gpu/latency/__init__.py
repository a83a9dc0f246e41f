"""Predicted times of linears, attention and whole decoder layers, from a GPU profile."""

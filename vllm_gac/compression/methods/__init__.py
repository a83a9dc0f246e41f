"""Compression methods, one a file: weights + statistics + dim -> smaller weights, all in fp64."""

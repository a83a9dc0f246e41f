"""Compression methods: weights and statistics of a layer to smaller weights, all in fp64."""

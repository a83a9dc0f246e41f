"""Attention over the packed, per-layer-sized KV cache."""

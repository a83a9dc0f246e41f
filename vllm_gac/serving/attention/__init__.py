"""Attention of gac layers: the choice of kernels, vLLM's backends, prefill and decode.

These modules may import `serving.config`, `serving.loading` and what lies below them, but not
`serving.model`.
"""

"""From a model directory to checked tensors: preflight of headers, the loader, its options.

These modules may import `serving.gac_config`, `serving.registration` and `serving.vllm_internals`,
but not `serving.config`, `serving.attention` or `serving.model`.
"""

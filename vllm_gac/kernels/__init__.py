"""Attention kernels for a KV cache whose layers have different sizes, in Triton and in plain torch.

A layer's cache is [pages, value_heads, tokens of a page, row]; a row holds the keys, or the latents
that give the keys, and the value of one token and one value head (layout/cache_geometry.py).

    rotate_and_cache, cache_write   put a step's keys and values into the cache
    decode/                         attention of the newest tokens over the cache
    gather_context, copy_columns    bring context and heads into the form that prefill kernels take
    swiglu                          gate and up projections of a small batch, with their activation
    skinny_gemm/                    linear layers of a few tokens: low-rank factors, several at once
    silu_mul                        the activation of gate and up that are two tensors, both ways
    rotate, divergence              rotations and the loss while a model is healed
    fp8_rows                        what is between FP8 linear layers
    on_all_cores                    compiles kernels on all cores
    gpu_limits                      what kernels may use of a GPU, and which linear layers ours take
    torch_reference                 the same attention in torch: for CPUs, and to test against

The package knows tensors and a CacheGeometry. It knows nothing of vLLM or of checkpoints.
"""

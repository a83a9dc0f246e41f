"""Linear layers of a few tokens, in one launch: of one input, beside each other, or gate and up.

A linear of a few tokens takes as long as reading its weights, if all multiprocessors read all the
time. A low-rank linear is two small linear layers, and most of the time of a small linear is lost
around the reading: before the first and after the last weights arrive, and between two launches.
Here

- linear layers that belong together are one launch: the up factors of queries, keys, values, or
  those of gate and up with SwiGLU on top;
- several programs share the input features of a linear that has too few output features for all
  multiprocessors. The last of them adds up what the others left in the L2 cache;
- a launch begins while the one before it still runs (programmatic dependent launch). Each program
  asks for its first weights before it waits for its input.

    launch          what callers use
    warmup          compiles the kernels before a server needs them
    tiling          how programs share a launch, and when ours is faster than cuBLAS: measured
    gemm            the kernel for several tokens, on tensor cores
    gemv            the kernel for one token, without them
    share           what both kernels share
"""

"""An experiment that is not served: decode with latent keys whose warps wait less for each other.

    python -m benchmarks.kernels.rare_reference [--out benchmarks/results/rare_reference_h200]

reference.py, keys.py (device functions) -> split_kv.py (the kernel) -> launch.py -> __main__.py

What bounds the served kernel (vllm_gac/kernels/decode/latent_split_kv.py) on Hopper is neither the
cache's bytes nor arithmetic. Take 8 latents of 64 with 4 value heads of 128, in bf16. An H200's
multiprocessor takes 1.25 us for a tile of 64 tokens (benchmarks/results/latent_spans_h200.md). The
tile's bytes take 1.03 us. By counting its instructions, the matrix unit is busy for half a
microsecond, and issuing the 600 instructions of each warp takes a third of one. An fp8 cache has
half the bytes, but the kernel is hardly faster. Each program is a chain: in every tile, its warps
wait for the matrix unit six times (with fp8 eight times), meet at seven barriers, and fence what
the matrix unit reads from shared memory four times. Registers have room for two such chains only.

So the kernel here does the same with a shorter chain:

- The softmax's reference is renewed in some tiles only. That takes three of the barriers and the
  scaling of all sums out of the other tiles (reference.py).
- Low and high halves of the rotated keys meet the queries in one product, not in two.
- Even and odd columns of fp8 latents meet the up-projection in one product, not in two (keys.py).
- With fp8, 4 latents of 128 get tiles of 64 tokens, so that two programs share a multiprocessor.

What was tried beside it, and is slower: eight rows of queries instead of sixteen (Triton then
leaves Hopper's asynchronous instructions); values times weights with the values' columns along the
long side; both heads' keys of a tile in one product with the queries (too few registers); three
programs on a multiprocessor with 168 registers a thread (they do not suffice).
"""

"""An experiment that is not served: most rotary pairs of latent keys meet the query as latents.

The served kernel (vllm_gac/kernels/decode/latent_split_kv.py) rebuilds every number of every key
and rotates it. That, not the cache's bytes, is what takes its time. Here only the pairs that turn
fast are rebuilt and rotated. The slow ones are met in the latent space, through a few polynomials
of a token's place in a span of tokens (slow_pairs.py). This needs no training. It is exact but for
the polynomials' error, which is chosen.

    python -m benchmarks.kernels.latent_spans [--out benchmarks/results/latent_spans_h200]

slow_pairs.py (pairs and polynomials) -> split_kv.py (the kernel) -> launch.py -> __main__.py

Why it is not served: with four latents that each give keys to two heads, it is faster than the
served kernel; with eight smaller latents, which have less to rebuild, it is slower. The command
prints both. It also prints a bound: the same kernel with its slow pairs left out. Its results are
wrong, but no way of adding the slow part can be faster. The bound is near the time of the cache's
bytes in both cases, so what is left to gain is in the slow part.

What was tried:

- Two nested loops, over spans and over the tiles of a span, are faster than one loop over tiles
  that makes new vectors under an `if`.
- The arithmetic is not what costs. Each tile waits for a chain of matrix instructions: latents by
  up-projection, latents by vectors, keys by queries, weights by values. Triton makes a program wait
  for one product before it starts the next. The slow part adds a link to the chain.
- Short spans make vectors often, and that costs more than the pairs that they save. Long spans need
  more polynomials or more fast pairs. Four polynomials on about a thousand tokens are the best that
  we found for a RoPE base of 5e5. At a base of 1e4, pairs turn faster, so spans may be short only.
- ptxas 12.8 has a fault (tests/kernels/sass.py) that appears whenever both operands of a product
  come from shared memory. So latents pass through registers, as in the served kernel.
- Fewer registers for each thread, so that three programs fit on a multiprocessor, are slower.

What would have to change: one product for each latent, by a matrix whose columns are those of the
fast pairs and, beside them, polynomials x query heads. The vectors of all spans would come from a
small kernel that runs before. Or asynchronous products, in Gluon or CUTLASS, so that a tile's
chain runs while the next tile's chain does.
"""

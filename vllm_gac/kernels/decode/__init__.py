"""Decode attention: the newest tokens of every sequence attend to the paged cache.

`launch.decode_attention` is the entry. It launches one of two split-KV kernels, and then `merge`:

    split_kv            rotary keys, cached as they are; its docstring explains all short names
    latent_split_kv     latent keys (PaLU), rebuilt by the functions of latent_keys
    merge               combines what several programs computed for the same queries

    schedule            which program reads which tiles
    rows                where queries, cache rows and results are in memory
    byte_pairs          how tiles of an fp8 cache reach the tensor cores
    softmax             visibility, online softmax and the sum of the weighted values
    tiling              tile size, warps and pipeline stages for a geometry and a GPU
    warmup              compiles all of these before a server needs them
"""

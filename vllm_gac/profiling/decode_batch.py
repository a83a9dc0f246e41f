"""A decode batch on the GPU, of any head sizes."""

import itertools
from collections.abc import Callable

import torch

from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.torch_reference import LatentKeys, paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.profiling.stock_kernels import stock_decode

DEVICE = torch.device("cuda")
_MORE_THAN_L2 = 300_000_000  # bytes


class DecodeBatch:
    """Sequences of one context length, with random numbers and pages in random order.

    A small cache has several copies that are read in turn, so that none is read from L2.

    Args:
        geometry: the heads and their sizes.
        sequences: number of sequences, each with one new token.
        context: tokens in the cache of each sequence.
        block_size: tokens per page.
        dtype: of the cache.
        head_dim: if given, keys are latent and rebuilt to heads of this size.
        kv_heads: number of rebuilt heads; by default one per latent key head.
        only_compiled: all sequences share one page, which is enough to compile the kernel.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        sequences: int,
        context: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        only_compiled: bool = False,
    ) -> None:
        self.geometry, self.context = geometry, context
        self.scale = (head_dim or geometry.key_size) ** -0.5
        row = geometry.key_width + geometry.value_size
        self.bytes = sequences * context * geometry.value_heads * row * dtype.itemsize
        self.copies = 1 if only_compiled else max(1, min(60, ceil_div(_MORE_THAN_L2, self.bytes)))
        blocks = ceil_div(context, block_size)
        pages = torch.randperm(self.copies * sequences * blocks, device=DEVICE).int()
        if only_compiled:
            pages.zero_()
        shape = (1 if only_compiled else len(pages), geometry.value_heads, block_size, row)
        self.cache = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_().to(dtype)
        self._tables = itertools.cycle(pages.view(self.copies, sequences, blocks).unbind(0))
        self.seq_lens = torch.full((sequences,), context, dtype=torch.int32, device=DEVICE)
        self.query_start_loc = torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE)
        heads = geometry.query_heads
        self.query = torch.randn(sequences, heads, geometry.query_size, device=DEVICE).bfloat16()
        self.output = torch.empty(
            sequences, heads, geometry.value_size, device=DEVICE, dtype=torch.bfloat16
        )
        shared = (kv_heads or geometry.key_heads) // geometry.key_heads
        self.latent = _latent(geometry, head_dim, shared) if head_dim else None
        self.scratch = decode_scratch(geometry, 1, DEVICE, self.latent)

    @property
    def calls(self) -> int:
        """Number of calls to time: enough to read every copy of the cache."""
        return max(5, self.copies)

    def next_table(self) -> torch.Tensor:
        """The block table of the copy of the cache whose turn it is."""
        return next(self._tables)

    def gac(self, only_compile: bool = False, table: torch.Tensor | None = None) -> None:
        """Decode with our kernel, or only compile it; the block table is by default the next."""
        decode_attention(
            self.query,
            self.cache,
            self.next_table() if table is None else table,
            self.query_start_loc,
            self.seq_lens,
            self.geometry,
            self.scale,
            self.output,
            self.scratch,
            latent=self.latent,
            only_compile=only_compile,
        )

    def stock(self) -> Callable[[], None]:
        """A function that decodes with vLLM's backend, for equal heads and sizes only."""
        return stock_decode(
            self.query,
            self.cache,
            self.next_table,
            self.query_start_loc,
            self.seq_lens,
            self.context,
            self.scale,
            self.output,
        )

    def gac_error(self) -> float:
        """Relative error of our kernel on the first two sequences, against fp32."""
        table = self.next_table()
        self.output.fill_(float("nan"))
        self.gac(table=table)
        few = min(2, self.seq_lens.shape[0])
        expected = torch.zeros(self.output[:few].shape, device=DEVICE)
        paged_attention(
            self.query[:few],
            self.cache,
            table[:few],
            range(few + 1),
            [self.context] * few,
            self.geometry,
            self.scale,
            expected,
            latent=self.latent,
        )
        return float((self.output[:few].float() - expected).norm() / expected.norm())


def _latent(geometry: CacheGeometry, head_dim: int, shared: int) -> LatentKeys:
    shape = (geometry.key_heads, shared * head_dim, geometry.key_size)
    up = torch.randn(shape, device=DEVICE) / geometry.key_size**0.5
    exponents = torch.arange(0, head_dim, 2, device=DEVICE) / head_dim
    return LatentKeys(up.bfloat16(), (5e5**-exponents)[None].contiguous())

"""How a layer's keys and values are packed in the paged KV cache."""

from dataclasses import dataclass
from typing import Self

from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.key_forms import KeyForm, is_latent
from vllm_gac.layout.rounding import GRANULE, round_up


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """How one rank's rows of a layer's cache are packed.

    The cache is [blocks, value_heads, block_size, row]; the row of a value head holds the key
    parts of its key_heads / value_heads key heads, `key_size` elements each, then its value.
    Rotary keys are cached after RoPE, and `query_size` equals `key_size`. Latent keys are cached
    as latents, and `query_size` is the size of the heads that are rebuilt from them.
    """

    query_heads: int
    query_size: int
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    form: KeyForm = "rotary"

    @classmethod
    def of(cls, layout: ModelLayout, layer: LayerLayout, tensor_parallel_size: int = 1) -> Self:
        """The geometry of `layer` on one of `tensor_parallel_size` ranks.

        Args:
            layout: the whole model, or one whose heads are copied so that the ranks can share them.
            layer: one of its layers.
            tensor_parallel_size: divides the numbers of query, key and value heads.

        Returns:
            The heads of one rank, at the sizes that the layout says.
        """
        return cls(
            query_heads=layer.query_heads // tensor_parallel_size,
            query_size=layout.query_size(layer),
            key_heads=layer.key.heads // tensor_parallel_size,
            key_size=layer.key.size,
            value_heads=layer.value.heads // tensor_parallel_size,
            value_size=layer.value.size,
            form=layer.key.form,
        )

    @property
    def is_latent(self) -> bool:
        """Whether keys are rebuilt from what is cached."""
        return is_latent(self.form)

    @property
    def is_plain(self) -> bool:
        """Whether every cached row is one key and its value, with nothing to rebuild."""
        return not self.is_latent and self.key_heads == self.value_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Sizes of keys and of values as prefill kernels run them: multiples of GRANULE.

        For latent keys, it is the size of the rebuilt heads.
        """
        return round_up(self.query_size, GRANULE), round_up(self.value_size, GRANULE)

    @property
    def key_width(self) -> int:
        """Numbers of a row that are keys; the rest is the value."""
        return self.key_heads * self.key_size // self.value_heads

"""Up-projections of latent keys in e4m3, for tensor-core products with latents in e4m3."""

from dataclasses import dataclass

import torch

from vllm_gac.kernels.torch_reference import LatentKeys

# The largest number of a pair's rows. e4m3 has as many digits for small numbers as for large ones,
# down to 2^-6; rebuilt keys must not exceed fp16's 65,504.
_LARGEST = 16.0


@dataclass(frozen=True, slots=True)
class E4m3Up:
    """up = scale * sum of `terms`.

    terms: e4m3 [KV heads, terms, head_dim, key_size].
    scale: fp32 [KV heads, head_dim / 2]: of each rotary pair, whose two halves share it.
    """

    terms: torch.Tensor
    scale: torch.Tensor


def e4m3_up(latent: LatentKeys, terms: int) -> E4m3Up:
    """`latent.up` as a sum of `terms` matrices in e4m3; each further one holds what is missing."""
    pairs = latent.inv_freq.shape[-1]
    up = latent.up.float().reshape(-1, 2, pairs, latent.up.shape[-1])
    scale = (up.abs().amax((1, 3)) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    rest = up / scale[:, None, :, None]
    found = []
    for _ in range(terms):
        found.append(rest.to(torch.float8_e4m3fn))
        rest = rest - found[-1].float()
    return E4m3Up(torch.stack(found, 1).flatten(2, 3).contiguous(), scale.contiguous())

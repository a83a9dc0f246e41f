"""Losses as a calibration would have measured them, made up: for tests of what plans by them."""

import numpy as np

from vllm_gac.layout.dims import LINEARS, ModelLayout
from vllm_gac.planning.losses import Curve


def made_up_losses(dense: ModelLayout, seed: int = 0) -> list[dict[str, Curve]]:
    """Convex curves of random steepness, that differ by layer and part."""
    random = np.random.default_rng(seed)
    layer = dense.layers[0]

    def curve(full: int) -> Curve:
        left = 1 - np.arange(full + 1) / full
        return 10.0 ** random.uniform(-3, -1) * left ** random.uniform(1.0, 4.0)

    layers: list[dict[str, Curve]] = []
    for _ in dense.layers:
        curves = {"width": curve(layer.intermediate_size)}
        for group in (1, 2):
            for name in ("rotary", "latent", "value"):
                curves[f"{name}{group}"] = curve(group * dense.head_dim)
        for name in LINEARS:
            curves[f"rank.{name}"] = curve(min(dense.linear_shape(layer, name)))
        layers.append(curves)
    return layers

"""docs/served_layer.md: the layer that the page computes is the reference model's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.dense_models import config
from vllm_gac.compression.reference_model import Reference, layer_forward
from vllm_gac.layout.dims import KeyLayout, ValueLayout, layout_of

PAGE = Path(__file__).parents[1] / "docs/served_layer.md"


def test_the_layer_of_the_page_is_the_reference_models() -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("\n```")[0]
    page: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), page)
    dense = layout_of(
        config(
            hidden_size=page["HIDDEN"],
            intermediate_size=2 * page["WIDTH"],
            num_hidden_layers=1,
            num_attention_heads=page["QUERY_HEADS"],
            num_key_value_heads=page["KV_HEADS"],
            head_dim=page["HEAD_DIM"],
        )
    )
    layer = replace(
        dense.layers[0],
        key=KeyLayout("latent", page["LATENTS"], page["RANK"]),
        value=ValueLayout(page["VALUE_HEADS"], page["VALUE_SIZE"]),
        intermediate_size=page["WIDTH"],
        ranks={"self_attn.q_proj": page["Q_RANK"]},
    )
    layout = replace(dense, layers=(layer,))
    shapes = {f"model.layers.0.{name}": tuple(w.shape) for name, w in page["weights"].items()}
    assert shapes == dict(layout.layer_tensors(0))
    model = Reference(
        layout, page["inv_freq"], page["EPS"], None, torch.float32, torch.device("cpu")
    )
    one, other = (
        layer_forward(model, layer, page["weights"], hidden[None])[0]
        for hidden in (page["one"], page["other"])
    )
    torch.testing.assert_close(page["output"], torch.cat((one[5:], other)), rtol=1e-4, atol=1e-5)

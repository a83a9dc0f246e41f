"""README.md of a compressed model: what was done to which model, and every layer's dims."""

from collections.abc import Mapping

from vllm_gac import __version__
from vllm_gac.checkpoint.base_model import base_model
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import Plan, PlanBudget
from vllm_gac.shown import in_markdown


def model_card(
    checkpoint: Checkpoint, plan: Plan, layout: ModelLayout, measured: Mapping[str, str]
) -> str:
    """The model card as Markdown. `measured` is the metadata of the statistics, empty if none."""
    calibration = (
        f"{in_markdown(measured['tokens'])} tokens in sequences of "
        f"{in_markdown(measured['sequence_length'])}"
        if measured
        else "none needed"
    )
    methods = ", ".join(plan.methods) or "none"
    base = base_model(checkpoint)
    return f"""{base.front_matter()}
# {base.name}, compressed by vllm-gac {__version__}

Serve it with `vllm serve DIR --load-format gac` (vLLM with the vllm-gac plugin).

| | dense | compressed | share | budget |
|---|---:|---:|---:|---:|
{_budget("parameters", plan.parameters, plan.param_ratio)}
{_budget("KV cache, numbers per token", plan.kv_elements, plan.kv_ratio)}

Methods: {methods}. Alignment: {plan.align}. Calibration: {calibration}.{_loss(plan)}

{base.licence_sentence()}

{layer_table(layout)}

`plan.json` holds these dims and their budgets; `gac` in `config.json` is what serving goes by.
"""


def layer_table(layout: ModelLayout) -> str:
    """Every layer's dims as a Markdown table."""
    head = "| layer | keys (heads x size) | values | MLP width | ranks |\n|---:|---|---|---:|---|"
    return "\n".join((head, *(_row(index, layer) for index, layer in enumerate(layout.layers))))


def _budget(what: str, budget: PlanBudget, ratio: float) -> str:
    share = budget.used / budget.dense
    return f"| {what} | {budget.dense:,} | {budget.used:,} | {share:.4f} | {ratio} |"


def _loss(plan: Plan) -> str:
    if plan.expected_loss is None:
        return ""
    return f" Expected loss: {plan.expected_loss:.4f} nats per token."


def _row(index: int, layer: LayerLayout) -> str:
    ranks = ", ".join(f"{name.split('.')[1]} {rank}" for name, rank in layer.ranks.items())
    key = f"{layer.key.form} {layer.key.heads} x {layer.key.size}"
    value = f"{layer.value.heads} x {layer.value.size}"
    return f"| {index} | {key} | {value} | {layer.intermediate_size} | {ranks or '-'} |"

"""README.md of the models that vllm-gac writes: what was done to which model, and its dims."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.base_model import BaseModel, base_model
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.effort import per_channel
from vllm_gac.compression.measured import Measured
from vllm_gac.errors.sanitize import in_markdown
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.planning.expected_loss import in_words
from vllm_gac.planning.plan_file import Plan, PlanBudget
from vllm_gac.planning.predicted_times import three_times
from vllm_gac.version import version

_SERVE = (
    "Serve it with `vllm serve MODEL --load-format gac` (vLLM with the vllm-gac plugin), where\n"
    "MODEL is this directory, or its id on the Hub."
)


def compressed_card(
    dense: ModelLayout,
    base: BaseModel,
    plan: Plan,
    layout: ModelLayout,
    measured: Measured | None,
    calibrated_on: str | None,
    unpacked: str | None,
) -> str:
    """The card of the model that `plan` makes of the dense model `base`.

    `measured` is None if no statistics were needed. `calibrated_on` says what text they are of;
    None if that is unknown. `unpacked` is a sentence about what is no longer packed, or None.
    """
    calibration = "none needed"
    if measured is not None:
        text = "" if calibrated_on is None else f" of {in_markdown(calibrated_on)}"
        calibration = (
            f"{measured.tokens} tokens in sequences of {measured.sequence_length}{text}"
            f"{per_channel(dense, measured.tokens)}"
        )
    methods = ", ".join(plan.methods) or "none"
    return _joined(
        base,
        f"compressed by vllm-gac {version()}",
        _SERVE,
        "| | dense | compressed | share | budget |\n"
        "|---|---:|---:|---:|---:|\n"
        f"{_budget('parameters', plan.parameters, plan.param_ratio)}\n"
        f"{_budget('KV cache, numbers per token', plan.kv_elements, plan.kv_ratio)}",
        f"Methods: {methods}. Alignment: {plan.align}. Calibration: {calibration}.{_loss(plan)}"
        f"{_times(plan)}{'' if unpacked is None else f' Quantized as before, but {unpacked}.'}",
        base.origin(),
        _layer_table(layout),
        "`plan.json` holds these dims and their budgets; `gac` in `config.json` is what serving "
        "goes by.",
    )


def imported_card(source: Checkpoint, format: str, files: Sequence[Path], dtype: str) -> str:
    """The card of a model that `files`, written by another tool in `format`, were converted to.

    `dtype` is torch's name of the dtype in which the weights are stored now.
    """
    sizes = "\n".join(
        f"- {in_markdown(path.name)}, {path.stat().st_size:,} bytes" for path in files
    )
    return _card(
        source,
        f"converted by vllm-gac {version()} from {format}",
        f"Made from these files, whose weights are unchanged but for their type, now {dtype}, and "
        "products of\nfactors that were larger than the matrix:",
        sizes,
        _numbers(source.layout),
        _layer_table(source.layout),
        "`gac` in `config.json` is what serving goes by.",
    )


def repaired_card(source: Checkpoint, after: ModelLayout, strategy: str) -> str:
    """The card of a model whose dims were padded to those of `after`, aligned by `strategy`."""
    before = source.layout
    return _card(
        source,
        f"repaired by vllm-gac {version()}",
        "| | before | repaired |\n"
        "|---|---:|---:|\n"
        f"| parameters | {before.parameters:,} | {after.parameters:,} |\n"
        f"| KV cache, numbers per token | {before.kv_elements:,} | {after.kv_elements:,} |",
        f"Dims are padded with zeros, alignment {strategy}.",
        _layer_table(after),
    )


def exported_card(source: Checkpoint) -> str:
    """The card of a model that was written for other engines."""
    return _card(
        source,
        f"exported by vllm-gac {version()}",
        _numbers(source.layout),
        _layer_table(source.layout),
        "The dims of layers are in `config.json`, in `per_layer_config` and `block_configs` if "
        "they differ.",
        serve="",
    )


def healed_card(source: Checkpoint, teacher: Checkpoint, entry: Mapping[str, Any]) -> str:
    """The card of a model that was trained to predict what `teacher` predicts.

    `entry` is what config.json says of the healing under "gac".
    """
    loss, divergence = entry["loss"], entry["divergence"]
    trained = trained_in_words(source, entry["lora_rank"])
    return _card(
        source,
        f"healed by vllm-gac {version()}",
        f"Trained on {entry['tokens']:,} tokens to predict what {in_markdown(entry['teacher'])} "
        f"predicts ({trained}, learning rate {entry['learning_rate']:g}).\n"
        f"On {entry['held_out_tokens']:,} tokens of held-out text:",
        "| nats per token | teacher | before | healed |\n"
        "|---|---:|---:|---:|\n"
        f"| divergence from the teacher | 0 | {divergence['before']:.4f} | "
        f"{divergence['after']:.4f} |\n"
        f"| loss | {loss['teacher']:.4f} | {loss['before']:.4f} | {loss['after']:.4f} |",
        _numbers(source.layout),
        _layer_table(source.layout),
        "`gac` in `config.json` is what serving goes by.",
    )


def trained_in_words(source: Checkpoint, adapter_rank: int | None) -> str:
    """What healing trains of a model."""
    what = "whole weights" if adapter_rank is None else f"adapters of rank {adapter_rank}"
    return what if source.quantization is None else f"{what} of attention that is not packed"


def _card(source: Checkpoint, what_was_done: str, *paragraphs: str, serve: str = _SERVE) -> str:
    """A card that begins with how to `serve` the model and where its base model is."""
    base = base_model(source)
    return _joined(base, what_was_done, f"{serve}\n{base.origin()}".lstrip(), *paragraphs)


def _joined(base: BaseModel, what_was_done: str, *paragraphs: str) -> str:
    heading = f"{base.front_matter()}\n# {base.name}, {what_was_done}"
    return "\n\n".join((heading, *paragraphs)) + "\n"


def _numbers(layout: ModelLayout) -> str:
    return (
        f"{layout.parameters:,} parameters; {layout.kv_elements:,} numbers per token in the KV "
        "cache."
    )


def _budget(what: str, budget: PlanBudget, ratio: float) -> str:
    share = budget.used / budget.dense
    return f"| {what} | {budget.dense:,} | {budget.used:,} | {share:.4f} | {ratio} |"


def _loss(plan: Plan) -> str:
    if plan.expected_loss is None:
        return ""
    said = in_words(plan.expected_loss, plan.notes.get("expected_interval"))
    return f" Expected loss: {said} from the dense model."


def _times(plan: Plan) -> str:
    if (times := three_times(plan)) is None:
        return ""
    deployment = in_markdown(str(plan.notes.get("deployment")))
    return f"\n\nPredicted time of a step of the decoder layers on {deployment}: {times}."


def _layer_table(layout: ModelLayout) -> str:
    head = "| layer | keys (heads x size) | values | MLP width | ranks |\n|---:|---|---|---:|---|"
    return "\n".join((head, *(_row(index, layer) for index, layer in enumerate(layout.layers))))


def _row(index: int, layer: LayerLayout) -> str:
    ranks = ", ".join(f"{name.split('.')[1]} {rank}" for name, rank in layer.ranks.items())
    key = f"{layer.key.form} {layer.key.heads} x {layer.key.size}"
    value = f"{layer.value.heads} x {layer.value.size}"
    return f"| {index} | {key} | {value} | {layer.intermediate_size} | {ranks or '-'} |"

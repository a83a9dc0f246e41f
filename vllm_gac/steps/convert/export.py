"""Write a model as other engines read it: whole heads, each layer's own widths, nothing packed.

transformers 5 and ModelOpt read `per_layer_config` in config.json, Puzzletron's tools
`block_configs`. Both know the number of KV heads and the MLP width of each layer; tensors have the
names and shapes of a plain model of these dims. Where all layers are alike, config.json is that of
a plain model. What they cannot say is refused.

The output directory appears only when it is complete (see runs/workspace.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.quantized.formats import KEYS
from vllm_gac.checkpoint.writer import fingerprint
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import OF_TOOLS
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import LayerLayout, ModelLayout, ValueLayout
from vllm_gac.layout.families import FAMILIES
from vllm_gac.steps.model_card import exported_card
from vllm_gac.steps.model_run import Output, refuse_broken
from vllm_gac.steps.rewritten import refuse_mixed, write_files

# What config.json no longer says.
_DROPPED = ("gac", "torch_dtype", *OF_TOOLS, *KEYS)


def export(
    model: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> ModelLayout:
    """Write a model whose heads are whole as transformers and Puzzletron's tools read it.

    What is quantized, in a format that is read, is written as the numbers that it stands for.

    Args:
        model: A model directory in any format that can be served, or its id on the Hub.
        out: The directory to write; it appears only when it is complete.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        resume: Whether to continue a run that was stopped.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The layout of the model, which stays as it is.

    Raises:
        CheckpointError: The model could not be served, or has what only its own format can say.
        DiskError: `out` exists, or the disk is full.

    Examples:
        >>> import vllm_gac
        >>> layout = vllm_gac.export("llama", "exported")
        >>> layout.layers[0].intermediate_size
        93
    """
    directory = model_directory(model, revision)
    output = Output(Path(out), "export", [directory], resume)
    output.check()
    _, source = open_any_format(directory)
    refuse_broken(source)
    refuse_mixed(source, "export")
    config = exported_config(source)
    with output.run({"model": fingerprint(source)}) as run:
        if not run.finished:
            _write(source, config, run.model, progress)
    return source.layout


def exported_config(source: Checkpoint) -> dict[str, Any]:
    """config.json of a model, with the dims of its layers as other engines read them.

    Raises:
        CheckpointError: A layer has what they cannot say; the first one is named.
    """
    raw, layout = source.raw_config, source.layout
    if (family := FAMILIES[raw["model_type"]]).fused:
        raise CheckpointError(
            f"{source.directory}: other engines read a {family.name} with q, k and v in one "
            "tensor, and gate and up in another, which export does not write; serve it as it is"
        )
    if layout.experts:
        raise CheckpointError(
            f"{source.directory}: other formats have no place for smaller heads, and of a "
            f"{family.name} nothing else is compressed; serve it as it is"
        )
    for index, layer in enumerate(layout.layers):
        for what in _own_forms(layout, layer):
            raise CheckpointError(
                f"{source.directory}: layer {index}: {what}: other formats say how many KV heads "
                f"of {layout.head_dim} a layer has, and how wide its MLP is, and no more; plan "
                "with --method prune to export the model"
            )
    queries = layout.layers[0].query_heads
    if raw["model_type"] == "llama" and layout.hidden_size % queries:
        raise CheckpointError(
            f"{source.directory}: transformers reads no Llama whose hidden size, "
            f"{layout.hidden_size}, is no multiple of its {queries} query heads; serve it as it is"
        )
    if raw["model_type"] == "qwen2" and layout.hidden_size != queries * layout.head_dim:
        raise CheckpointError(
            f"{source.directory}: of a Qwen2 vLLM ignores head_dim, and hidden states of "
            f"{layout.hidden_size} are not as wide as its {queries} query heads of "
            f"{layout.head_dim}, so vLLM would compute another model; serve it as it is"
        )
    kept = {key: value for key, value in raw.items() if key not in _DROPPED}
    kept |= {
        "architectures": [family.architecture],
        "hidden_size": layout.hidden_size,
        "vocab_size": layout.vocab_size,
        "head_dim": layout.head_dim,
    }
    if kept.get("dtype") is None and "torch_dtype" in raw:
        kept["dtype"] = raw["torch_dtype"]
    dims = [_dims(layer) for layer in layout.layers]
    if all(layer_dims == dims[0] for layer_dims in dims):
        return kept | dims[0]
    dense_dims = {
        key: dim if all(layer_dims[key] == dim for layer_dims in dims) else kept.get(key) or dim
        for key, dim in dims[0].items()
    }
    differing = {
        str(index): {key: dim for key, dim in layer_dims.items() if dim != dense_dims[key]}
        for index, layer_dims in enumerate(dims)
    }
    return kept | {
        **dense_dims,
        "per_layer_config": {
            index: layer_dims for index, layer_dims in differing.items() if layer_dims
        },
        "block_configs": [_block(layer_dims) for layer_dims in dims],
    }


def _own_forms(layout: ModelLayout, layer: LayerLayout) -> Iterator[str]:
    """What of a layer only our own format can say."""
    size, key, value = layout.head_dim, layer.key, layer.value
    if layer.query_heads != (first := layout.layers[0].query_heads):
        yield f"{layer.query_heads} query heads, {first} in layer 0"
    for linear, rank in layer.ranks.items():
        yield f"{linear} has two factors of rank {rank}"
    if key.is_latent:
        yield f"keys are latents of {key.size}"
    elif key.rope_table or key.size != size:
        yield f"keys have {key.size} numbers and RoPE frequencies of their own"
    if value != ValueLayout(key.heads, size):
        yield f"{value.heads} values of {value.size} go with {key.heads} keys of {key.size}"
    if abs(layout.softmax_scale * size**0.5 - 1) > 1e-6:  # as the format rounds it
        yield f"scores are multiplied by {layout.softmax_scale:g}"


def _dims(layer: LayerLayout) -> dict[str, int]:
    """The dims of a layer by transformers' keys."""
    return {
        "num_attention_heads": layer.query_heads,
        "num_key_value_heads": layer.key.heads,
        "intermediate_size": layer.intermediate_size,
    }


def _block(dims: dict[str, int]) -> dict[str, Any]:
    """The same as Puzzletron's tools have it."""
    kv_heads, width = dims["num_key_value_heads"], dims["intermediate_size"]
    return {
        "attention": {"no_op": False, "num_key_value_heads": kv_heads},
        "ffn": {"no_op": False, "intermediate_size": width},
    }


def _write(source: Checkpoint, config: dict[str, Any], directory: Path, progress: bool) -> None:
    layout = source.layout
    with source.reader() as read, torch.inference_mode():
        write_layer_shards(
            directory,
            layout,
            lambda index: read_layer(layout, read, index),
            read,
            description="export",
            progress=progress,
        )
    write_files(source.directory, directory, config, exported_card(source))

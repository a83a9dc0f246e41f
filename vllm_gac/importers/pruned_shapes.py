"""The layout of a pruned Hugging Face model, inferred from the shapes of its tensors.

Tools that prune heads and MLP channels leave tensors whose shapes differ from the config, often in
a different way in every layer. The shapes are enough to infer the layout if head sizes did not
change, or only values became smaller. Smaller rotary keys would need RoPE frequencies that the
files do not hold.
"""

from dataclasses import replace

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout


def infer_layout(checkpoint: Checkpoint) -> ModelLayout:
    """Infer the layout of a model directory without a `"gac"` object.

    The number of layers, the head size and the biases are as the config says. Raises
    CheckpointError naming a tensor that is missing or fits no layout. Tensors that are not needed
    for this are checked by `faults`.
    """
    embedding = "model.embed_tokens.weight"
    vocab_size, hidden_size = _shape(checkpoint, embedding)
    if hidden_size % (heads := checkpoint.layout.layers[0].query_heads):
        why = f"transformers wants a multiple of the config's {heads} attention heads"
        raise _nonsense(checkpoint, embedding, why)
    dense = replace(checkpoint.layout, vocab_size=vocab_size, hidden_size=hidden_size)
    layers = tuple(_layer(checkpoint, dense, index) for index in range(len(dense.layers)))
    return replace(dense, layers=layers)


def _layer(checkpoint: Checkpoint, dense: ModelLayout, index: int) -> LayerLayout:
    attention, size = f"model.layers.{index}.self_attn.", dense.head_dim
    q, k, v, o = (f"{attention}{x}_proj.weight" for x in "qkvo")
    query_heads = _divided(checkpoint, q, 0, size)
    key_heads = _divided(checkpoint, k, 0, size)
    value_size = _divided(checkpoint, o, 1, query_heads)
    value_heads = _divided(checkpoint, v, 0, value_size)
    if query_heads % key_heads:
        raise _nonsense(checkpoint, k, f"{query_heads} query heads cannot share {key_heads} evenly")
    if key_heads % value_heads:
        raise _nonsense(checkpoint, v, f"{key_heads} key heads cannot share {value_heads} evenly")
    width, _ = _shape(checkpoint, f"model.layers.{index}.mlp.gate_proj.weight")
    return LayerLayout(
        query_heads=query_heads,
        key=KeyLayout("rotary", key_heads, size),
        value=ValueLayout(value_heads, value_size),
        intermediate_size=width,
    )


def _divided(checkpoint: Checkpoint, name: str, axis: int, by: int) -> int:
    """The tensor's dim along `axis` divided by `by`, e.g. the number of heads of size `by`."""
    dim = _shape(checkpoint, name)[axis]
    if dim % by:
        raise _nonsense(checkpoint, name, f"{dim} is not a multiple of {by}")
    return dim // by


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """The rows and columns of matrix `name`."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{checkpoint.directory}: {name}: missing")
    if len(info.shape) != 2 or min(info.shape) < 1:
        raise _nonsense(checkpoint, name, "expected a matrix")
    return info.shape[0], info.shape[1]


def _nonsense(checkpoint: Checkpoint, name: str, why: str) -> CheckpointError:
    info = checkpoint.tensors[name]
    return CheckpointError(
        f"{checkpoint.directory / info.file}: {name}: shape {list(info.shape)} fits no layout of "
        f"heads of {checkpoint.layout.head_dim}: {why}; see head_dim in config.json"
    )

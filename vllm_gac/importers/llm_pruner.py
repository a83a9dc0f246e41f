"""LLM-Pruner (Ma et al., NeurIPS 2023, arXiv:2305.11627): pytorch_model.bin, a whole module.

{"model": LlamaForCausalLM, "tokenizer": ...} with tensors under their usual names, but heads and
MLP channels missing in every layer anew (--block_wise), hidden channels missing in all of them
(--channel_wise) or whole layers (--layer_wise). The config still says what there was.
"""

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Imported, Source, dense_of, imported
from vllm_gac.importers.pickled_model import PickledModel
from vllm_gac.importers.pruned_shapes import infer_layout
from vllm_gac.layout.schema import HfConfig, validate


def read(model: PickledModel) -> Imported:
    """Read the model. Raises CheckpointError naming the file and the tensor that is wrong."""
    where, directory = f"{model.path}: config", model.path.parent
    base, dense = dense_of(model.config, where)
    config = validate(HfConfig, base, where)
    layout = infer_layout(Checkpoint(directory, base, config, dense, model.tensors))
    if layout == dense and not model.config_differs:
        raise CheckpointError(
            f"{model.path}: a dense model, from which nothing was pruned; save it with "
            "save_pretrained(safe_serialization=True) and serve that directory"
        )
    if layout.hidden_size % config.num_attention_heads:
        raise CheckpointError(
            f"{model.path}: hidden size {layout.hidden_size}: not a multiple of the config's "
            f"{config.num_attention_heads} attention heads, which transformers refuses; prune "
            "again, to a multiple (round_to)"
        )
    return imported(
        "llm-pruner",
        directory,
        base,
        layout,
        sources={name: Source((name,)) for name in layout.tensors()},
        expected=layout.tensors(),
        tensors=model.tensors,
        unused=frozenset({"lm_head.weight"} if layout.tie_word_embeddings else ()),
        originals=model.reader,
    )

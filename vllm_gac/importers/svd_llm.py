"""SVD-LLM (Wang et al., ICLR 2025, arXiv:2403.07378): *_whitening_only_*.pt, merge.pt and the like.

{"model": LlamaForCausalLM or MistralForCausalLM, "tokenizer": ...} in which every linear of a
layer is two, named and shaped as in `svd_llm_export.py`. Factors are fp32 beside fp16 norms and
embeddings. The modules' own sizes are not looked at: SVD_MistralAttention states the rank of q_proj
for k_proj and v_proj too, and SVD_LlamaAttention knows no grouped queries and turns with RoPE base
10000 whatever the model's; served is what the config says, with which the factors were computed.
"""

from vllm_gac.importers.factorized import Factorized, import_factorized, linear_names
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.importers.pickled_model import PickledModel
from vllm_gac.importers.svd_llm_export import FLAT, ranks_of


def wrote(model: PickledModel) -> bool:
    """Whether the model has this tool's factors."""
    return any(name.endswith("_v_proj.weight") for name in model.stored)


def read(model: PickledModel) -> Imported:
    """The model. Raises CheckpointError naming file and tensor that make no sense."""
    directory = model.path.parent
    base, dense = dense_of(model.config, f"{model.path}: config")
    ranks = ranks_of(directory, linear_names(dense), FLAT, model.tensors)
    return import_factorized(
        "svd-llm",
        directory,
        Factorized(base, dense, ranks, FLAT),
        model.tensors,
        mixed_dtypes=True,
        originals=model.reader,
    )

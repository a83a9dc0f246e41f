"""SVD-LLM (Wang et al., ICLR 2025, arXiv:2403.07378): *_whitening_only_*.pt, merge.pt and the like.

{"model": LlamaForCausalLM or MistralForCausalLM, "tokenizer": ...} in which every linear of a
layer is two, with the names and shapes of `svd_llm_export.py`. The factors are fp32, norms and
embeddings fp16. The sizes in the modules are ignored: SVD_MistralAttention has the rank of q_proj
for k_proj and v_proj, too, and SVD_LlamaAttention has no grouped queries and always uses the RoPE
base 10000. The model is served as its config says, with which the factors were computed.
"""

from vllm_gac.importers.factorized import Factorized, import_factorized, linear_names
from vllm_gac.importers.imported import Imported, dense_of
from vllm_gac.importers.pickled_model import PickledModel
from vllm_gac.importers.svd_llm_export import FLAT, ranks_of


def wrote(model: PickledModel) -> bool:
    """Whether the model has this tool's factors."""
    return any(name.endswith("_v_proj.weight") for name in model.stored)


def read(model: PickledModel) -> Imported:
    """Read the model. Raises CheckpointError naming the file and the tensor that is wrong."""
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

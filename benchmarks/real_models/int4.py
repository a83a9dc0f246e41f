"""The dense model in W4A16, by LLM Compressor: int4 weights in groups of a row, made by GPTQ.

LLM Compressor needs versions of its own of some packages that vLLM has, too: it is only imported
here, and CONTRIBUTING says how to have it.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from vllm_gac.checkpoint.digests import DIGESTS
from vllm_gac.steps.evaluate.perplexity import window_batches
from vllm_gac.texts.tokenizer import ModelTokenizer

_LENGTH = 1024


def write_w4a16(
    model: Path,
    out: Path,
    texts: Sequence[Path],
    *,
    max_tokens: int,
    group_size: int,
    device: str,
) -> None:
    """Write the model in compressed-tensors' format "pack-quantized".

    Args:
        model: The dense model, or a compressed one where vllm_gac.transformers is imported.
        out: The new directory.
        texts: To calibrate on.
        max_tokens: To calibrate on.
        group_size: Elements of a row that share a scale.
        device: The torch device.
    """
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    batches, _ = window_batches(ModelTokenizer(model), texts, length=_LENGTH, max_tokens=max_tokens)
    samples = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = group_size
    dense = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
    oneshot(
        model=dense,
        dataset=DataLoader(samples, batch_size=None),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        num_calibration_samples=len(samples),
        sequential_offload_device=device,
    )
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    dense.save_pretrained(partial, save_compressed=True)
    for file in model.iterdir():  # the tokenizer as it is; indexes and digests are of other weights
        is_of_weights = ".safetensors" in file.name or file.name == DIGESTS
        if not (is_of_weights or (partial / file.name).exists()):
            shutil.copy(file, partial)
    partial.rename(out)

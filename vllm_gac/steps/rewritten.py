"""What the steps share that write a model: the files beside its shards."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import copy_file, write_json, write_text
from vllm_gac.checkpoint.base_model import base_model
from vllm_gac.checkpoint.locate import auxiliary_files, tokenized_by_mistral
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import OF_TOOLS
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.texts.tokenizer import has_template, keep_tokens

logger = logging.getLogger(__name__)


def refuse_mixed(source: Checkpoint, step: str) -> None:
    """Raise CheckpointError for weights of several dtypes, which a gac directory cannot hold.

    `step` is what the user wants to do, e.g. "repair".
    """
    if not source.mixed_dtypes:
        return
    dtypes = {source.tensors[name].dtype for name, shape in source.required().items() if shape[1:]}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{source.directory}: weights in {' and '.join(sorted(dtypes))} side by side; make "
            f"them one with 'vllm-gac import', and {step} what comes out"
        )


def refuse_quantized(source: Checkpoint, step: str) -> None:
    """Raise CheckpointError for packed weights, which stay as they are.

    `step` is what the user wants to do, e.g. "repair".
    """
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.directory}: is quantized by {source.quantization.method}; {step} the 16-bit "
            "model, and quantize what comes out"
        )


def write_config_and_tokenizer(
    source: Checkpoint, layout: ModelLayout, done: Mapping[str, Any], card: str, directory: Path
) -> None:
    """Write the tokenizer and other auxiliary files, the config and the model card.

    Args:
        source: The model that was there before.
        layout: The layout of the model in `directory`.
        done: What config.json says was done to it, by the name of the step.
        card: The text of the model card.
        directory: Where the shards are.
    """
    earlier = source.config.gac.source if source.config.gac else {}
    recorded = earlier | base_model(source).recorded()
    if "heal" in done:
        for of_the_model_before in ("measured", "max_loss"):
            recorded.pop(of_the_model_before, None)
    config = {
        **source.raw_config,
        "architectures": [ARCHITECTURE],
        "hidden_size": layout.hidden_size,
        "vocab_size": layout.vocab_size,
        "head_dim": layout.cache_head_dim,
        "gac": layout.section({**recorded, **done}),
    }
    write_files(source.directory, directory, config, card)


def write_files(source: Path, directory: Path, config: Mapping[str, Any], card: str) -> None:
    """Write what a model has beside its shards, but for its index.

    Args:
        source: The directory with its tokenizer, generation config, chat templates and licence.
        directory: Where the shards are.
        config: Its config.json.
        card: The text of the model card.
    """
    for path in auxiliary_files(source):
        copy = directory / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        copy_file(path, copy)
    said = source / "tokenizer_config.json"
    if said.is_file() and read_json(said).get("auto_map"):
        logger.warning(
            "%s: auto_map: this tokenizer is made by Python code, which is not copied; read that "
            "code, and copy it to what comes out yourself",
            said,
        )
    if tokenized_by_mistral(source):
        if (gac := config.get("gac")) is None:
            logger.warning(
                "%s: vLLM makes this model's tokens with mistral-common; serve what comes out with "
                "--tokenizer-mode mistral, or its tokens are those of tokenizer.json",
                source,
            )
        else:
            config = {
                **config,
                "gac": gac | {"source": gac.get("source", {}) | {"tokenizer_mode": "mistral"}},
            }
    if "gac" in config:
        config = {key: value for key, value in config.items() if key not in OF_TOOLS}
    write_json(directory / "config.json", config)
    write_text(directory / "README.md", card)
    keep_tokens(source, directory)
    of_processor = directory / "chat_template.json"  # which a text model does not have
    if of_processor.exists() and not has_template(directory):
        template = read_json(of_processor).get("chat_template")
        if template is not None:
            write_text(directory / "chat_template.jinja", template)

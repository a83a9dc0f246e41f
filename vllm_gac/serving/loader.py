"""`--load-format gac`: vLLM's default loader behind a strict gate.

The default loader serves a model whose tensors are missing, of the wrong shape or NaN. Here the
headers must match the layout before a byte of a tensor is read, and values must be finite.
"""

import dataclasses
import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from vllm_gac.checkpoint import faults, open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.registration import refuse_if_unregistered
from vllm_gac.schema import validate
from vllm_gac.serving.config_hook import layout_of_hf

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

MAX_FAULTS_SHOWN = 5


class LoaderOptions(BaseModel):
    """`--model-loader-extra-config`: ours, and those of vLLM's default loader."""

    model_config = ConfigDict(extra="forbid", strict=True)

    finite_check: bool = True
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
    enable_multithread_load: bool = False
    num_threads: int | None = None
    enable_weights_track: bool | None = None


class GacModelLoader(DefaultModelLoader):
    """Loads gac directories, and dense ones exactly as vLLM does."""

    def __init__(self, load_config: LoadConfig) -> None:
        refuse_if_unregistered()
        extra = load_config.model_loader_extra_config
        self.options = validate(LoaderOptions, extra, "--model-loader-extra-config")
        stock = self.options.model_dump(
            include={"enable_multithread_load", "num_threads", "enable_weights_track"},
            exclude_none=True,
        )
        # "safetensors" and not "auto": a pickle beside the shards must never be opened.
        super().__init__(
            dataclasses.replace(
                load_config, load_format="safetensors", model_loader_extra_config=stock
            )
        )

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the checkpoint. Raises CheckpointError naming file and tensor."""
        if self.options.weights == "dummy":
            DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, model_config)
        else:
            super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The checkpoint's tensors, once all headers are right, each checked to be finite.

        Both loading and reloading come through here.
        """
        self._preflight(model_config)
        for name, tensor in super().get_all_weights(model_config, model):
            # One-byte floats have no isfinite; they come from a quantizer, not from compression.
            checkable = tensor.is_floating_point() and tensor.element_size() > 1
            if self.options.finite_check and checkable and not tensor.isfinite().all():
                raise CheckpointError(
                    f"{model_config.model}: {name} contains NaN or infinity; compress again, or "
                    "serve it as it is with --model-loader-extra-config "
                    "'{\"finite_check\": false}'"
                )
            yield name, tensor

    def _preflight(self, model_config: ModelConfig) -> None:
        """Raise CheckpointError unless the headers hold exactly the tensors of the layout."""
        hf_config = model_config.hf_config
        if getattr(hf_config, "quantization_config", None) is not None:
            return  # packed as the quantizer likes
        try:
            layout = layout_of_hf(hf_config)
        except CheckpointError as e:
            # A gac config was parsed by the config hook, so this is another architecture.
            logger.info("Loading without a preflight, as --load-format auto does: %s", e)
            return
        revision = model_config.revision
        folder, *_ = self._prepare_weights(model_config.model, None, revision, False, None)
        # The served config rules, not the file: --hf-overrides may have changed it.
        checkpoint = dataclasses.replace(open_checkpoint(Path(folder)), layout=layout)
        shown = list(itertools.islice(faults(checkpoint), MAX_FAULTS_SHOWN))
        if shown:
            raise CheckpointError(f"refusing to serve {folder}: {'; '.join(shown)}")
        logger.info("All %d tensor headers are as the config says", len(checkpoint.tensors))

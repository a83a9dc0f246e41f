"""`--load-format gac`: vLLM's default loader behind a strict gate.

The default loader serves a model whose tensors are missing, of the wrong shape or NaN. Here the
headers must match the layout before a byte of a tensor is read, and values must be finite.

Tensors are read, checked and put together on several threads, while this one copies to the device.
"""

import dataclasses
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_gac.alignment.zero_padding import padded_tensors
from vllm_gac.checkpoint.dtypes import WEIGHT_DTYPES, stored_dtype
from vllm_gac.checkpoint.finite import all_finite
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.names import LOAD_FORMAT
from vllm_gac.layout.schema import HfConfig, validate
from vllm_gac.layout.tensor_parallel import repeated_tensor, with_heads_of
from vllm_gac.serving.hf_layouts import layout_of_hf, stored_layout
from vllm_gac.serving.loading.options import loader_options
from vllm_gac.serving.loading.parallel_reads import read_in_parallel
from vllm_gac.serving.loading.preflight import preflight, refused_to_serve
from vllm_gac.serving.loading.quantized_checkpoint import check_packed
from vllm_gac.serving.loading.rope_overrides import check_table, chosen_from
from vllm_gac.serving.registration import refuse_if_unregistered

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


class GacModelLoader(DefaultModelLoader):
    """Loads directories in any format that we serve, dense ones exactly as vLLM does."""

    def __init__(self, load_config: LoadConfig) -> None:
        refuse_if_unregistered()
        self.options = loader_options(load_config.model_loader_extra_config)
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

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """The model, without weights; none is built for a checkpoint that would be refused."""
        if self.options.weights == "checkpoint":
            self._preflight(model_config)
        return super().create_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the checkpoint. Raises CheckpointError naming file and tensor."""
        if self.options.weights == "dummy":
            DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, model_config)
            return
        if self.options.enable_weights_track is None and _is_packed_gac(model_config):
            # vLLM does so for plain models only; a scale that no file has would be any number.
            self.enable_weights_track = True
        super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The layout's tensors, once all headers are right, each checked to be finite.

        Padded where the config says so. Both loading and reloading come through here.
        """
        checkpoint = self._preflight(model_config)
        if checkpoint is None:
            for name, tensor in super().get_all_weights(model_config, model):
                if not self._accepts(tensor):
                    raise _not_finite(f"{model_config.model}: {name}")
                yield name, tensor
            return
        self.counter_before_loading_weights = time.perf_counter()  # vLLM logs how long it took
        served = validate(HfConfig, model_config.hf_config.to_dict(), "config.json")
        repeated = layout_of_hf(model_config.hf_config)
        padded = with_heads_of(repeated, checkpoint.layout)
        elsewhere = _on_other_stages(model)
        names = [name for name in checkpoint.layout.tensors() if not name.startswith(elsewhere)]
        with (
            checkpoint.reader() as read,
            closing(self._stored_tensors(checkpoint, names, read)) as stored,
        ):
            own = _of_this_rope(stored, model_config.hf_config)
            for name, tensor in padded_tensors(checkpoint.layout, padded, served.rope, own):
                yield name, repeated_tensor(padded, repeated, name, tensor)

    def _stored_tensors(
        self, checkpoint: Checkpoint, names: list[str], read: TensorReader
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Tensors of the checkpoint's layout by name: as they are, else made of what there is."""

        def checked(name: str) -> torch.Tensor:
            tensor = read(name)
            if not self._accepts(tensor):
                raise _not_finite(checkpoint.broken_part(name))
            return tensor

        # The embeddings are the largest: first, so that nobody waits for them at the end.
        names = sorted(names, key=lambda name: name.startswith("model.layers."))
        hidden = not enable_tqdm(self.load_config.use_tqdm_on_load)
        with closing(read_in_parallel(checked, names, self.options.threads)) as tensors:
            yield from tqdm(tensors, "Loading tensors", len(names), disable=hidden)

    def _accepts(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is finite, or nobody asked."""
        # One-byte floats come from a quantizer, not from compression.
        dtype = stored_dtype(tensor.dtype)
        if not self.options.finite_check or dtype is None or dtype.name not in WEIGHT_DTYPES:
            return True
        return all_finite(tensor.contiguous().view(-1).view(torch.uint8).numpy(), dtype.name)

    def _preflight(self, model_config: ModelConfig) -> Checkpoint | None:
        """The checkpoint, whose headers are right; None for what vLLM's own loader is to read.

        Raises CheckpointError for a model that is neither a Llama nor a Mistral.
        """
        if fault := refused_to_serve(Path(model_config.model)):
            raise CheckpointError(f"{model_config.model}: {fault}")
        hf_config = model_config.hf_config
        packed = _is_packed(model_config)
        try:
            layout = stored_layout(hf_config)
        except CheckpointError as e:
            if getattr(model_config, "runner_type", None) != "draft":
                raise CheckpointError(
                    f"--load-format {LOAD_FORMAT}: cannot check this model ({e}); leave it out"
                ) from e
            # It comes with a gac model's load format, and only proposes what that one verifies.
            logger.info("Loading a drafter without a preflight: %s", e)
            return None
        revision = model_config.revision
        folder, *_ = self._prepare_weights(model_config.model, None, revision, False, None)
        if packed:
            check_packed(Path(folder), layout)
            return None  # read as the quantizer's format wants it
        checkpoint = preflight(Path(folder), layout, hf_config.to_dict())
        logger.info("All %d tensor headers are as the config says", len(checkpoint.tensors))
        return checkpoint


def _of_this_rope(
    tensors: Iterable[tuple[str, torch.Tensor]], hf_config: PreTrainedConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    own = chosen_from(hf_config)
    for name, tensor in tensors:
        if own is not None and name.endswith(".rope_inv_freq"):
            check_table(name, tensor, own)
        yield name, tensor


def _is_packed(model_config: ModelConfig) -> bool:
    return getattr(model_config.hf_config, "quantization_config", None) is not None


def _is_packed_gac(model_config: ModelConfig) -> bool:
    return _is_packed(model_config) and getattr(model_config.hf_config, "gac", None) is not None


def _on_other_stages(model: nn.Module) -> tuple[str, ...]:
    """How names begin of tensors that another stage of the pipeline has, and reads and checks."""
    modules = model.named_modules()
    return tuple(f"{name}." for name, module in modules if isinstance(module, PPMissingLayer))


def _not_finite(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: contains NaN or infinity; compress again, or serve it as it is with "
        "--model-loader-extra-config '{\"finite_check\": false}'"
    )

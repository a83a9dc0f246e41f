"""`--load-format gac`: vLLM's default loader with strict checks.

The default loader serves a model even if tensors are missing, have the wrong shape or hold NaN.
This loader compares the headers with the layout before it reads any tensor, and checks that all
values are finite.

Several threads read, check and assemble tensors, while the calling thread copies them to the
device.
"""

import dataclasses
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_gac.alignment.zero_padding import padded_tensors
from vllm_gac.checkpoint.dtypes import WEIGHT_DTYPES, stored_dtype
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.checkpoint.tensor_files import OUT_OF_RANGE, all_in_range
from vllm_gac.checkpoint.values import rope_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.families import LOAD_FORMAT
from vllm_gac.layout.tensor_parallel import repeated_tensor, with_heads_of
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.options import loader_options
from vllm_gac.serving.loading.preflight import preflight, refuse_unserved_files
from vllm_gac.serving.loading.quantized_checkpoint import quantization_section

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


class GacModelLoader(DefaultModelLoader):
    """Loads directories in any format that we serve, dense and quantized models included."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.options = loader_options(load_config.model_loader_extra_config)
        stock_options = self.options.model_dump(
            include={"enable_multithread_load", "num_threads", "enable_weights_track"},
            exclude_none=True,
        )
        # "safetensors", not "auto", so that a pickle beside the shards is never opened.
        super().__init__(
            dataclasses.replace(
                load_config, load_format="safetensors", model_loader_extra_config=stock_options
            )
        )

    def create_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """The model without weights. The checkpoint is checked before memory is allocated."""
        if self.options.weights == "checkpoint":
            self._preflight(model_config)
        return super().create_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load the checkpoint. Raises CheckpointError naming file and tensor."""
        if self.options.weights == "dummy":
            DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(model, model_config)
            return
        hf_config = model_config.hf_config
        is_packed_gac = quantization_section(hf_config) is not None and hasattr(hf_config, "gac")
        if self.options.enable_weights_track is None and is_packed_gac:
            # vLLM tracks loaded weights of unquantized models only. Without tracking, a scale that
            # no file has would keep whatever is in memory.
            self.enable_weights_track = True
        super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The tensors of the served layout: checked, padded and with repeated heads.

        vLLM calls this to load and to reload weights. Names and shapes are those of the served
        layout before it is sharded; a quantized checkpoint keeps its own. Raises CheckpointError if
        a header does not match the layout, or a tensor is not as it was written, or has values out
        of range.
        """
        checkpoint = self._preflight(model_config)
        if checkpoint is None:
            for name, tensor in super().get_all_weights(model_config, model):
                if not self._accepts(tensor):
                    raise _out_of_range(f"{model_config.model}: {name}")
                yield name, tensor
            return
        self.counter_before_loading_weights = time.perf_counter()  # vLLM logs the time since
        config = GacConfig.of(model_config.hf_config)
        repeated = config.served
        padded = with_heads_of(repeated, checkpoint.layout)
        other_stages = _prefixes_of_other_stages(model)
        names = [name for name in checkpoint.layout.tensors() if not name.startswith(other_stages)]
        with (
            checkpoint.reader(any_value=True) as read,
            closing(self._stored_tensors(checkpoint, names, read)) as stored,
        ):
            rope = config.checked.rope
            for name, tensor in padded_tensors(checkpoint.layout, padded, rope, stored):
                yield name, repeated_tensor(padded, repeated, name, tensor)

    def _stored_tensors(
        self, checkpoint: Checkpoint, names: list[str], read: TensorReader
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Names and tensors of the checkpoint's layout, read or computed from what is stored."""

        def checked(name: str) -> torch.Tensor:
            tensor = read(name)
            if not self._accepts(tensor):
                raise _out_of_range(checkpoint.broken_part(name))
            return tensor

        # Embeddings come first: they are the largest, and the end should not wait for them.
        names = sorted(names, key=lambda name: name.startswith("model.layers."))
        hidden = not enable_tqdm(self.load_config.use_tqdm_on_load)
        with closing(read_in_parallel(checked, names, self.options.threads)) as tensors:
            yield from tqdm(tensors, "Loading tensors", len(names), disable=hidden)

    def _accepts(self, tensor: torch.Tensor) -> bool:
        """Whether the values of `tensor` are in range; True if it is not to be checked."""
        # One-byte floats come from a quantizer, and are not checked.
        dtype = stored_dtype(tensor.dtype)
        if not self.options.finite_check or dtype is None or dtype.name not in WEIGHT_DTYPES:
            return True
        return all_in_range(tensor.contiguous().view(-1).view(torch.uint8).numpy(), dtype.name)

    def _preflight(self, model_config: ModelConfig) -> Checkpoint | None:
        """The checkpoint, after its headers have been checked.

        None for a quantized checkpoint or a drafter, which vLLM's own loader reads. Raises
        CheckpointError if a file is not as it was written, the headers do not match the layout, a
        RoPE table does not match config.json, or the model is of no known family.
        """
        refuse_unserved_files(Path(model_config.model))
        try:
            config = GacConfig.of(model_config.hf_config)
            _ = config.stored
        except CheckpointError as e:
            if getattr(model_config, "runner_type", None) != "draft":
                raise CheckpointError(
                    f"--load-format {LOAD_FORMAT}: cannot check this model ({e}); leave it out"
                ) from e
            # A drafter gets the load format of its gac model. The gac model verifies its drafts.
            logger.info("Loading a drafter without a preflight: %s", e)
            return None
        revision = model_config.revision
        folder, *_ = self._prepare_weights(
            model_config.model,
            subfolder=None,
            revision=revision,
            fall_back_to_pt=False,
            allow_patterns_overrides=None,
        )
        if (checkpoint := preflight(Path(folder), config)) is None:
            return None
        for fault in rope_faults(checkpoint):
            raise CheckpointError(fault)
        logger.info("All %d tensor headers are as the config says", len(checkpoint.tensors))
        return checkpoint


def _prefixes_of_other_stages(model: nn.Module) -> tuple[str, ...]:
    """Name prefixes of tensors that belong to other pipeline stages, which read and check them."""
    modules = model.named_modules()
    return tuple(f"{name}." for name, module in modules if isinstance(module, PPMissingLayer))


def _out_of_range(where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {OUT_OF_RANGE}; compress again, or serve it as it is with "
        "--model-loader-extra-config '{\"finite_check\": false}'"
    )


def read_in_parallel(
    read: Callable[[str], torch.Tensor], names: Iterable[str], threads: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Names and tensors as they become ready, which is nearly in the order of `names`, each once.

    Each of the `threads` reads at most two tensors ahead, so that memory stays bounded. Exceptions
    of `read`, which reads one tensor by its name, are raised here.
    """
    with ThreadPoolExecutor(threads, "read") as pool:
        waiting: set[Future[tuple[str, torch.Tensor]]] = set()
        try:
            for name in names:
                waiting.add(pool.submit(lambda name: (name, read(name)), name))
                if len(waiting) >= 2 * threads:
                    yield from _ready(waiting)
            while waiting:
                yield from _ready(waiting)
        finally:
            pool.shutdown(cancel_futures=True)


def _ready(
    waiting: set[Future[tuple[str, torch.Tensor]]],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The results that are ready, at least one. They are removed from `waiting`."""
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    waiting -= done
    while done:
        yield done.pop().result()

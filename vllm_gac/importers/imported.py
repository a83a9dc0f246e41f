"""What every importer produces: a model another tool wrote, described as one of our layouts.

An importer reads config.json and tensor headers only. It says which tensors the tool's files must
hold (`expected`, by their original names, for the preflight), and how each tensor of the layout is
made of them (`sources`, when it is loaded). Where tensors come from is a parameter: safetensors
unless `originals` says otherwise.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.layout.schema import HfConfig, validate

if TYPE_CHECKING:
    import torch

Format: TypeAlias = Literal[
    "gac",
    "dense",
    "hf-pruned",
    "palu",
    "asvd",
    "svd-llm",
    "low-rank",
    "lems",
    "basis-sharing",
    "per-layer-config",
    "block-configs",
    "layer-lists",
    "llm-pruner",
]

# Gives a tensor by its name, or raises CheckpointError: a TensorReader, a pickle's reader.
Read: TypeAlias = Callable[[str], "torch.Tensor"]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def as_stored(tensor: "torch.Tensor") -> "torch.Tensor":
    """The `make` of a tensor that is only renamed, if that."""
    return tensor


@dataclass(frozen=True, slots=True)
class Source:
    """How one tensor of the layout is made: `make` of the file's tensors `names`, in their order.

    `make` imports torch itself, does not change its arguments and returns the dtype they have.
    """

    names: tuple[str, ...]
    make: "Callable[..., torch.Tensor]" = as_stored


@dataclass(frozen=True, kw_only=True)
class Imported(Checkpoint):
    """A model as a tool wrote it, and the layout it is served by.

    `raw_config` is the config.json to serve it by, `tensors` what the headers of its files say.
    `expected` holds name and shape of every tensor that the files must hold, `unused` those that
    they may hold beside them. `sources` has an entry for every tensor of `layout.tensors()`; they
    are what `reader` reads. `originals` opens the files; None means safetensors in `directory`.
    """

    format: Format
    sources: Mapping[str, Source]
    expected: Shapes
    unused: frozenset[str] = frozenset()
    originals: Callable[[], AbstractContextManager[Read]] | None = None

    @property
    def is_stored_as_served(self) -> bool:
        """Whether every tensor of the layout is in the files under its own name, as it is."""
        return all(source == Source((name,)) for name, source in self.sources.items())

    def required(self) -> Shapes:
        return self.expected

    def is_unused(self, name: str) -> bool:
        return name in self.unused or name.endswith(".rotary_emb.inv_freq")

    def is_finite(self, name: str) -> bool:
        if self.originals is None:
            return super().is_finite(name)
        with self.originals() as read:
            tensor = read(name)
            return not tensor.is_floating_point() or bool(tensor.isfinite().all())

    def broken_part(self, name: str) -> str:
        names = self.sources[name].names
        broken = [original for original in names if not self.is_finite(original)]
        if not names:
            return f"{self.directory}: {name}"
        parts = broken[:1] or names  # sound ones have a product that is too large
        return f"{self.directory / self.tensors[parts[0]].file}: {' and '.join(parts)}"

    def faults_of_made(self) -> Iterator[str]:
        made = [name for name, source in self.sources.items() if source.make is not as_stored]
        with self.reader() as read:
            for name in made:
                try:
                    tensor = read(name)
                except CheckpointError as e:
                    yield str(e)
                    continue
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    yield f"{self.broken_part(name)}: what they make, {name}, is not finite"

    def reader(self) -> "ImportedReader":
        """A context manager that reads the layout's tensors by their names."""
        return ImportedReader(self)


class ImportedReader(TensorReader):
    """Reads tensors of an imported model as its layout has them."""

    def __init__(self, imported: Imported) -> None:
        super().__init__(imported.directory, imported.tensors)
        self._imported = imported
        self._stack = ExitStack()
        self._read: Read = super().__call__

    def __enter__(self) -> Self:
        if self._imported.originals is not None:
            self._read = self._stack.enter_context(self._imported.originals())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        super().__exit__(kind, error, trace)

    def __call__(self, name: str) -> "torch.Tensor":
        """Tensor `name` of the layout. Raises CheckpointError if it cannot be had."""
        source = self._imported.sources.get(name)
        if source is None:
            raise CheckpointError(f"{self._imported.directory}: tensor {name} is missing")
        return source.make(*map(self._read, source.names))


def imported(
    format: Format,
    directory: Path,
    base: Mapping[str, Any],
    layout: ModelLayout,
    *,
    sources: Mapping[str, Source],
    expected: Shapes,
    tensors: Mapping[str, TensorInfo],
    **options: Any,
) -> Imported:
    """The model of a Llama or Mistral config `base` served by `layout`; `options` as `Imported`."""
    config = served_config(base, layout, format)
    return Imported(
        format=format,
        directory=directory,
        raw_config=config,
        config=validate(HfConfig, config, str(directory / "config.json")),
        layout=layout,
        sources=sources,
        expected=expected,
        tensors=tensors,
        **options,
    )


def served_config(base: Mapping[str, Any], layout: ModelLayout, format: Format) -> dict[str, Any]:
    """The config.json to serve `layout` by: that of a Llama or Mistral, with a `"gac"` object."""
    return {
        **base,
        "architectures": [ARCHITECTURE],
        "hidden_size": layout.hidden_size,
        "vocab_size": layout.vocab_size,
        "head_dim": layout.cache_head_dim,
        "tie_word_embeddings": layout.tie_word_embeddings,
        "gac": layout.section({"format": format}),
    }


def dense_of(
    raw: Mapping[str, Any], where: str, drop: tuple[str, ...] = ()
) -> tuple[dict[str, Any], ModelLayout]:
    """Config and layout of the Llama or Mistral that a tool started from, without its keys `drop`.

    Raises CheckpointError naming `where` and the key that makes no sense.
    """
    tool_type = raw.get("model_type")
    for model_type in ("llama", "mistral"):
        if isinstance(tool_type, str) and model_type in tool_type.lower():
            break
    else:
        raise CheckpointError(
            f"{where}: model_type: only Llama and Mistral models can be served, got {tool_type!r}"
        )
    dropped = ("auto_map", "gac", *drop)
    base = {key: value for key, value in raw.items() if key not in dropped}
    base |= {"model_type": model_type, "architectures": []}
    return base, layout_of(base, where)

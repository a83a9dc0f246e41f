"""What every importer returns: a model that another tool wrote, described by our ModelLayout.

An importer reads only config.json and tensor headers. It says which tensors the tool's files must
hold (`expected`, by their original names; the preflight checks them), and how each tensor of the
layout is made from them (`sources`, used when tensors are loaded).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.checkpoint.own_tensors import without_fused
from vllm_gac.checkpoint.quantized.formats import quantization_of
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES
from vllm_gac.layout.schema import HfConfig, validate

if TYPE_CHECKING:
    import torch

Format: TypeAlias = Literal[
    "gac",
    "dense",
    "hf-pruned",
    "asvd",
    "svd-llm",
    "per-layer-config",
    "block-configs",
]

# Keys of config.json by which transformers or a tool would build other layers than "gac" says.
OF_TOOLS = (
    "auto_map",
    "per_layer_config",
    "block_configs",
    "base_architecture",
    "anymodel_arch_info",
    "truncation_ranks",
)

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def as_stored(tensor: "torch.Tensor") -> "torch.Tensor":
    """The `make` of a tensor that is at most renamed."""
    return tensor


@dataclass(frozen=True, slots=True)
class Source:
    """How one tensor of the layout is made: `make` is called with the file's tensors `names`.

    `make` imports torch itself, does not modify its arguments, and returns their dtype.
    """

    names: tuple[str, ...]
    make: "Callable[..., torch.Tensor]" = as_stored


@dataclass(frozen=True, kw_only=True)
class Imported(Checkpoint):
    """A model as a tool wrote it, and the layout with which it is served.

    Its `raw_config` is the config.json to serve it with. `reader` reads tensors of the layout.

    Attributes:
        format: The format of the tool.
        sources: How each tensor of `layout.tensors()` is made.
        expected: Name and shape of every tensor that the files must hold.
        unused: Names of tensors that the files may also hold.
    """

    format: Format
    sources: Mapping[str, Source]
    expected: Shapes
    unused: frozenset[str] = frozenset()

    @cached_property
    def quantization(self) -> None:
        if quantization_of(self.raw_config, self.directory) is not None:
            raise CheckpointError(
                f"{self.directory}: is quantized in the files of another tool, which is not read"
            )

    def required(self) -> Shapes:
        return self.expected

    def is_unused(self, name: str) -> bool:
        return name in self.unused or super().is_unused(name)

    def broken_part(self, name: str) -> str:
        names = self.sources[name].names
        broken = [original for original in names if not self.is_in_range(original)]
        if not names:
            return f"{self.directory}: {name}"
        parts = broken[:1] or names  # if all parts are finite, their product is too large
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

    def reader(self, any_value: bool = False) -> "ImportedReader":
        """A context manager that reads tensors of the layout by name."""
        return ImportedReader(self, any_value)


class ImportedReader(TensorReader):
    """Reads the tensors of an imported model's layout."""

    def __init__(self, imported: Imported, any_value: bool) -> None:
        super().__init__(imported, any_value)
        self._imported = imported

    def __call__(self, name: str) -> "torch.Tensor":
        """Read tensor `name` of the layout. Raises CheckpointError if that is impossible."""
        source = self._imported.sources.get(name)
        if source is None:
            raise CheckpointError(f"{self._imported.directory}: tensor {name} is missing")
        return source.make(*map(super().__call__, source.names))


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
    """An `Imported` of the config `base` of a dense model, served with `layout`.

    `options` are further fields of `Imported`.
    """
    raw = served_config(base, layout, format)
    config = validate(HfConfig, raw, str(directory / "config.json"))
    return Imported(
        format=format,
        directory=directory,
        raw_config=raw,
        config=config,
        layout=layout,
        sources=sources,
        expected=expected,
        tensors=without_fused(directory, config.model_type, layout, tensors),
        **options,
    )


# Families for which tools have model types of their own, which contain the family's.
_RENAMED = ("llama", "mistral")


def served_config(base: Mapping[str, Any], layout: ModelLayout, format: Format) -> dict[str, Any]:
    """The config.json to serve `layout` with: the dense model's with a `"gac"` object."""
    return {
        **base,
        "architectures": [ARCHITECTURE],
        "hidden_size": layout.hidden_size,
        "vocab_size": layout.vocab_size,
        "head_dim": layout.cache_head_dim,
        "tie_word_embeddings": layout.tie_word_embeddings,
        "gac": layout.section({"format": format}),
    }


def dense_of(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ModelLayout]:
    """Config and layout of the model that a tool compressed, without the keys of tools.

    Tools give Llamas and Mistrals model types of their own, such as "asvd_llama". Other families
    are known by their plain model type only. Raises CheckpointError naming `where` and the key that
    is wrong.
    """
    tool_type = raw.get("model_type")
    for model_type in FAMILIES:
        as_named = tool_type.lower() if isinstance(tool_type, str) else ""
        if model_type == tool_type or (model_type in _RENAMED and model_type in as_named):
            break
    else:
        raise CheckpointError(
            f"{where}: model_type: expected a tool's name of Llama or Mistral, or one of "
            f"{', '.join(FAMILIES)}; got {tool_type!r}"
        )
    if (family := FAMILIES[model_type]).has_experts:
        raise CheckpointError(
            f"{where}: a {family.name} that another tool compressed, which is not read; experts "
            "are served as vllm-gac's own compression leaves them"
        )
    base = {key: value for key, value in raw.items() if key not in ("gac", *OF_TOOLS)}
    base |= {"model_type": model_type, "architectures": []}
    return base, layout_of(base, where)

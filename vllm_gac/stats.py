"""stats.safetensors: the input covariances of every layer's linears, as calibration measured them.

One fp32 tensor "layers.{i}.{linear}" [n, n] for each distinct input of a layer: q_proj (shared by
k_proj and v_proj), o_proj, gate_proj (shared by up_proj) and down_proj. o_proj's input is taken
over `value_group` neighbouring value heads, as many as are to be made one, so there
n = query_heads * value_group * head_dim.

The layers are appended one by one, which is why the file is laid out here: the header is known
beforehand, and a file that holds k whole layers is a calibration that can go on with layer k.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from vllm_gac.choices import MERGEABLE
from vllm_gac.errors import CheckpointError
from vllm_gac.layout import ModelLayout

# fp64 covariance [n, n] by the name of the linear whose input it is of.
LayerStats: TypeAlias = Mapping[str, torch.Tensor]

STATISTICS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def largest_value_group(layout: ModelLayout) -> int:
    """As many value heads as can be made one in a model of `layout`."""
    return max(group for group in MERGEABLE if layout.num_key_value_heads % group == 0)


def layer_shapes(layout: ModelLayout, value_group: int) -> dict[str, tuple[int, int]]:
    """Shape of each covariance of a layer of a dense model."""
    attended = layout.num_attention_heads * value_group * layout.head_dim
    width = layout.layers[0].intermediate_size
    sizes = (layout.hidden_size, attended, layout.hidden_size, width)
    return {name: (size, size) for name, size in zip(STATISTICS, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class StatsFile:
    """A statistics file that is being written: its header, and where it is."""

    path: Path
    header: bytes
    layer_bytes: int

    def whole_layers(self) -> int:
        """Layers already on disk; 0 if the file is another calibration's or none."""
        try:
            with self.path.open("rb") as file:
                if file.read(len(self.header)) != self.header:
                    return 0
                return (os.fstat(file.fileno()).st_size - len(self.header)) // self.layer_bytes
        except FileNotFoundError:
            return 0

    def start(self) -> None:
        """Write the header alone."""
        self._write(0, [self.header])

    def append(self, index: int, stats: LayerStats) -> None:
        """Write layer `index`, which follows on what is there; a torn layer is overwritten."""
        # A row at a time: one covariance may be gigabytes.
        pieces = (
            row.to("cpu", torch.float32).numpy().tobytes()
            for tensor in stats.values()
            for row in tensor
        )
        self._write(len(self.header) + index * self.layer_bytes, pieces)

    def _write(self, offset: int, pieces: Iterable[bytes]) -> None:
        try:
            with self.path.open("rb+" if offset else "wb") as file:
                file.truncate(file.seek(offset))
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise CheckpointError(f"{self.path}: cannot be written ({e})") from e


def stats_file(path: Path, layout: ModelLayout, metadata: Mapping[str, str]) -> StatsFile:
    """The statistics file of a model of `layout` at `path`; nothing is written yet.

    `metadata` says what was measured how; its "value_group" decides a shape.
    """
    shapes = layer_shapes(layout, int(metadata["value_group"]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for index in range(len(layout.layers)):
        for name, shape in shapes.items():
            end = offset + 4 * math.prod(shape)
            header[f"layers.{index}.{name}"] = {
                "dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]
            }  # fmt: skip
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    layer_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
    return StatsFile(path, len(text).to_bytes(8, "little") + text, layer_bytes)


def check_stats(
    path: Path, layout: ModelLayout, config_sha256: str, value_group: int = 1
) -> dict[str, str]:
    """The metadata of the statistics at `path`, for making up to `value_group` value heads one.

    Raises CheckpointError if they are unreadable, incomplete, another model's or do not reach.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path}: not a readable statistics file ({e})") from e
    if metadata.get("model_config_sha256") != config_sha256:
        raise CheckpointError(
            f"{path}: measured on another model (config.json differs); calibrate this one"
        )
    measured = metadata.get("value_group", "")
    if measured not in map(str, MERGEABLE) or int(measured) % value_group:
        raise CheckpointError(
            f"{path}: measured for {measured} value heads at a time, {value_group} are to be made "
            "one; calibrate again"
        )
    expected = layer_shapes(layout, int(measured))
    for index in range(len(layout.layers)):
        for name, shape in expected.items():
            got = found.get(f"layers.{index}.{name}")
            if got != shape:
                raise CheckpointError(f"{path}: layers.{index}.{name}: shape {got}, not {shape}")
    return metadata


def read_layer_stats(path: Path, index: int, device: str) -> LayerStats:
    """The covariances of layer `index`, fp64 on `device`. Raises CheckpointError if not finite."""
    stats = {}
    with safe_open(path, framework="pt") as file:
        for name in STATISTICS:
            tensor = file.get_tensor(f"layers.{index}.{name}").to(device, torch.float64)
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{path}: layers.{index}.{name}: contains NaN or infinity")
            stats[name] = tensor
    return stats

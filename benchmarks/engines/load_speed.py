"""Loading times of vLLM's loader and ours for the same model, from a cold and a warm page cache.

    python -m benchmarks.engines.load_speed MODELS --gigabytes 8

Writes a random bf16 Llama with the widths of Llama-3-8B and as many layers as fit, and a gac model
of about the same size with smaller, aligned dims. One process loads them in turns: the dense model
with vLLM's loader and with ours, the gac model with ours. A load is vLLM's `get_model`, from the
config to the last weight on the device, and includes our checks. Prints medians, and the ratio of
ours to vLLM's per byte. For a cold load the pages of the files are dropped first; the page says how
many stayed in memory.
"""

import argparse
import errno
import gc
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.llama3_8b import compressed
from benchmarks.common.markdown import table
from benchmarks.common.page import add_commit, origin, provenance, save
from vllm_gac.layout.dims import layout_of

_HEAD = 128
_LAYERS_A_SHARD = 4
_PAGES_LOOKED_AT = 256


def main() -> None:
    """Write what is not there yet, load, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the models are written, or are")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="of a model (default: 8)")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size (default: 4096)")
    parser.add_argument("--cold", type=int, default=2, help="cold loads each (default: 2)")
    parser.add_argument("--warm", type=int, default=3, help="warm loads each (default: 3)")
    parser.add_argument("--threads", type=int, help="our reading threads (default: the loader's)")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md; no suffix")
    add_commit(parser)
    args = parser.parse_args()

    models = {
        "dense": written(args.directory / "dense", dense_config(args.hidden, args.gigabytes)),
        "gac": written(args.directory / "gac", gac_config(args.hidden, args.gigabytes)),
    }
    extra = {"num_threads": args.threads} if args.threads else {}
    ways: dict[str, tuple[Path, str, dict[str, int]]] = {
        "dense, vLLM": (models["dense"], "auto", {}),
        "dense, gac": (models["dense"], "gac", extra),
        "gac, gac": (models["gac"], "gac", extra),
    }
    load = loader()
    for way in ways.values():
        load(*way)  # not counted: it pays for what happens once
    times: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in ways}
    stayed = []
    for _ in range(args.cold):
        for name, way in ways.items():
            stayed.append(drop_pages(way[0]))
            times[name]["cold"].append(load(*way))
    for _ in range(args.warm):
        for name, way in ways.items():
            times[name]["warm"].append(load(*way))
    sizes = {name: sum(f.stat().st_size for f in shards(way[0])) for name, way in ways.items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = f"python -m benchmarks.engines.load_speed MODELS --gigabytes {args.gigabytes:g}"
    result = provenance(command, device, args.commit)
    result |= {"seconds": times, "bytes": sizes, "stayed": stayed}
    text = page(result)
    print(text)
    if args.out:
        save(args.out, result, text)


def dense_config(hidden: int, gigabytes: float) -> dict[str, Any]:
    """config.json of a Llama with the proportions of Llama-3-8B, nearest to `gigabytes`."""
    heads = hidden // _HEAD
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": _HEAD,
        "vocab_size": 128256 if hidden >= 4096 else 4096,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return nearest(lambda layers: config | {"num_hidden_layers": layers}, gigabytes)


def gac_config(hidden: int, gigabytes: float) -> dict[str, Any]:
    """The same with three quarters of each layer's keys, values and MLP."""
    dense = dense_config(hidden, gigabytes)
    heads = dense["num_key_value_heads"]
    layer = {
        "key": {"form": "rotary", "heads": heads, "size": _HEAD * 3 // 4},
        "value": {"heads": heads, "size": _HEAD * 3 // 4},
        "intermediate_size": dense["intermediate_size"] * 3 // 4 // 64 * 64,
    }

    def of(layers: int) -> dict[str, Any]:
        return compressed(dense | {"num_hidden_layers": layers}, [layer] * layers)

    return nearest(of, gigabytes)


def nearest(config: Callable[[int], dict[str, Any]], gigabytes: float) -> dict[str, Any]:
    """`config` for the number of layers whose weights come nearest to `gigabytes`."""
    one, two = (2 * layout_of(config(layers)).parameters for layers in (1, 2))
    return config(max(1, 1 + round((gigabytes * 1e9 - one) / (two - one))))


def written(directory: Path, config: Mapping[str, Any]) -> Path:
    """Write the model of `config` in shards of a few layers, unless the directory has it."""
    if (directory / "config.json").exists():
        if json.loads((directory / "config.json").read_text()) != config:
            raise SystemExit(f"{directory}: holds another model; remove it or choose another")
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    layout, shapes, weight_map = layout_of(config), layout_of(config).tensors(), {}
    groups = [[n for n in shapes if not n.startswith("model.layers.")]]
    for start in range(0, len(layout.layers), _LAYERS_A_SHARD):
        stop = min(start + _LAYERS_A_SHARD, len(layout.layers))
        groups.append([n for i in range(start, stop) for n, _ in layout.layer_tensors(i)])
    block = (torch.randn(1 << 22) / 64).to(torch.bfloat16)
    for number, names in enumerate(groups):
        file = f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        tensors = {name: weight(name, shapes[name], block) for name in names}
        save_file(tensors, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def weight(name: str, shape: tuple[int, ...], block: torch.Tensor) -> torch.Tensor:
    """Numbers from `block` [elements] over and over, or what a norm or a RoPE table may be."""
    if name.endswith("rope_inv_freq"):
        return torch.rand(shape)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    elements = torch.Size(shape).numel()
    return block.repeat(-(-elements // len(block)))[:elements].view(shape)


def shards(directory: Path) -> list[Path]:
    """The files that hold the weights."""
    return sorted(directory.glob("*.safetensors"))


def drop_pages(directory: Path) -> float:
    """Drop the weights from the page cache; return the fraction of sampled pages that stayed."""
    seen = stayed = 0
    for path in shards(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # else dirty pages stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            step = max(4096, path.stat().st_size // _PAGES_LOOKED_AT)
            for position in range(0, path.stat().st_size, step):
                seen, stayed = seen + 1, stayed + is_cached(descriptor, position)
        finally:
            os.close(descriptor)
    return stayed / max(1, seen)


def is_cached(descriptor: int, position: int) -> bool:
    """Whether the page at `position` can be read without waiting."""
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except OSError as e:
        if e.errno == errno.EAGAIN:
            return False
        raise
    return True


def loader() -> Callable[[Path, str, dict[str, int]], float]:
    """A function that loads a directory with a load format and returns the seconds."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    if current_platform.is_cpu():  # vLLM's CPU worker does the same
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()

    def load(directory: Path, load_format: str, extra: dict[str, int]) -> float:
        config = EngineArgs(
            model=str(directory),
            load_format=load_format,
            model_loader_extra_config=extra,
            dtype="bfloat16",
            max_model_len=2048,
            enforce_eager=True,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                backend = "nccl" if current_platform.is_cuda() else "gloo"
                url = f"tcp://127.0.0.1:{port}"
                init_distributed_environment(1, 0, url, 0, backend)
                ensure_model_parallel_initialized(1, 1)
            start = time.perf_counter()
            model = get_model(vllm_config=config)
            synchronize()
            seconds = time.perf_counter() - start
        del model, config
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return seconds

    return load


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def page(result: Mapping[str, Any]) -> str:
    """The page: a table of medians, and their ratios per byte to the first row's."""
    times, sizes = result["seconds"], result["bytes"]
    stayed = max(result["stayed"], default=0.0)
    first = next(iter(times))
    rows = []
    for name, by_cache in times.items():
        cells = []
        for cache, seconds in by_cache.items():
            if not seconds:
                cells += ["-", "-"]
                continue
            median, base = statistics.median(seconds), statistics.median(times[first][cache])
            ratio = median / base * sizes[first] / sizes[name]
            cells += [f"{median:.2f} ({', '.join(f'{s:.2f}' for s in seconds)})", f"{ratio:.2f}"]
        rows.append([name, f"{sizes[name] / 1e9:.2f}", *cells])
    columns = ["model, loader", "GB", "cold", "cold over vLLM", "warm", "warm over vLLM"]
    lines = [
        "# How long loading takes",
        "",
        f"{origin(result)}.",
        "",
        f"Seconds to load, median (all). Cold: at most {stayed:.1%} of the pages stayed in memory.",
        "",
        *table(columns, rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

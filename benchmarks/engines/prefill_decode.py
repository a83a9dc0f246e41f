"""Prefill on one GPU and decode on another: is the answer the same, and when does it begin?

    python -m benchmarks.engines.prefill_decode OUT --models build/demo-gac

`equal`: each model of --models answers prompts on one GPU, and on two between which NIXL moves the
cache; in bf16, and with FP8 weights and an FP8 cache. `traffic`: a model of Llama-3-8B's shape, as
planned for FP8, serves short and long prompts that arrive at random, by one server; by two that
share the requests; and by one that prefills and one that decodes, also with larger blocks, and
with the dense model. UCX_PROTO_INFO=y makes the servers' logs name the way of the cache. Writes
OUT/prefill_decode.json and .md.
"""

import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import demo_text
from benchmarks.common.engine_process import Engine
from benchmarks.common.engine_questions import complete, facts
from benchmarks.common.llama3_8b import DENSE, write_models
from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import add_commit, documented, origin, provenance, save
from benchmarks.engines.parallel.models import FP8
from benchmarks.engines.whole_model.grid.cells import PLANNED_FP8
from benchmarks.engines.whole_model.planned import REQUESTS, planned
from loadtest.ab.server import Running, starting_server

_TYPES: dict[str, dict[str, Any]] = {"bf16": {}, "FP8 + FP8 cache": FP8}
# One engine computes the last token of these prompts in a step of its own, as a decoder does: a
# product of one row rounds otherwise than one of several.
_CHUNK = 96
_LENGTHS = (_CHUNK + 1, 2 * _CHUNK + 1, 5 * _CHUNK + 1)
_OUTPUT = 32
_ROLES = ("kv_producer", "kv_consumer")
# Both see both GPUs, each its own one first: CUDA's IPC needs to see the GPU that it reads from.
_GPUS = ("0,1", "1,0")
# (share of the requests, tokens of the prompt, tokens of the answer)
_SHORT, _LONG = (0.8, 512, 128), (0.2, 6144, 64)
_ONE, _TWO = "one server", "two servers"
# A pair of servers each, one of which prefills: the model, and more options of `vllm serve`.
_PAIRS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prefill and decode": (PLANNED_FP8, ()),
    "the same, blocks of 128 tokens": (PLANNED_FP8, ("--block-size", "128")),
    "dense, prefill and decode": ("dense", ()),
}
_START_SECONDS = 300
_PORT, _SIDE_CHANNEL = 8300, 5600  # of the first server, or engine


def main() -> None:
    """Run the parts, write and print the page."""
    parser = documented(__doc__)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--models", type=Path, nargs="*", default=[Path("build/demo-gac")])
    parser.add_argument("--rates", type=float, nargs="*", default=[4.0, 8.0], help="requests/s")
    parser.add_argument("--seconds", type=float, default=30, help="of each traffic (30)")
    add_commit(parser)
    args = parser.parse_args()
    command = f"python -m benchmarks.engines.prefill_decode {shlex.join(sys.argv[1:])}"
    result: dict[str, Any] = {
        **provenance(command, "cuda", args.commit),
        "vllm": version("vllm"),
        "seconds": args.seconds,
        "equal": {},
        "traffic": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "prefill_decode"
    for model in args.models:
        for types, options in _TYPES.items():
            result["equal"][f"{model.name}, {types}"] = _equal(model, options, args.out)
            save(file, result, page(result))
    if args.rates:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            servers = [
                stack.enter_context(server) for server in _servers(_write(directory), args.out)
            ]
            for server in servers:
                server.wait()
            urls = [server.base_url for server in servers]
            for rate in args.rates:
                for name in (_ONE, _TWO, *_PAIRS):
                    found = asyncio.run(_traffic(urls, name, rate, args.seconds))
                    result["traffic"].setdefault(str(rate), {})[name] = found
                    print(rate, name, found, flush=True)
                    save(file, result, page(result))
    print(page(result))


def _equal(model: Path, options: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Whether prompts are answered by two engines as by one, to the last bit of each logprob."""
    tokens = [token for window in demo_text.windows() for token in window]
    prompts = [tokens[start : start + length] for start in (0, 700, 1900) for length in _LENGTHS]
    size = {
        "load_format": "gac",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": _CHUNK,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    with ExitStack() as stack:
        engines = []
        for number, name in enumerate(("alone", *_ROLES)):
            gpus = _GPUS[0 if name == _ROLES[0] else 1]
            engine = Engine(
                name, out / f"{name}.log", CUDA_VISIBLE_DEVICES=gpus, **_side_channel(number)
            )
            stack.callback(engine.close, 20)
            transfer = {"kv_transfer_config": _transfer(name)} if name in _ROLES else {}
            engine.start(model=str(model), **size, **options, **transfer)
            engines.append(engine)
        alone, prefiller, decoder = engines
        for engine in engines:
            engine.wait(_START_SECONDS)
        equal, worst, tokens_equal = 0, 0.0, 0
        for prompt in prompts:  # one by one: no batch rounds otherwise
            [expected] = alone.ask(complete, prompts=[prompt], output=_OUTPUT)
            wanted = {"do_remote_decode": True, "do_remote_prefill": False}
            [prefilled] = prefiller.ask(complete, prompts=[prompt], output=1, transfers=[wanted])
            [found] = decoder.ask(
                complete, prompts=[prompt], output=_OUTPUT, transfers=[prefilled["transfer"]]
            )
            equal += found["logprobs"] == expected["logprobs"]
            tokens_equal += found["tokens"] == expected["tokens"]
            gaps = zip(found["logprobs"], expected["logprobs"], strict=True)
            worst = max(worst, *(abs(a - b) for a, b in gaps))
        return {
            "attention": alone.ask(facts)["attention"],
            "prompts": len(prompts),
            "equal": equal,
            "tokens_equal": tokens_equal,
            "worst": worst,
        }


def _transfer(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"kv_lease_duration": 900},
    }


def _side_channel(number: int) -> dict[str, str]:
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_SIDE_CHANNEL + number)}


def _write(work: str) -> dict[str, Path]:
    """The models of Llama-3-8B's shape, dense and planned, without weights, with a tokenizer."""
    write_models(Path(work), DENSE)
    dense, own = Path(work) / "dense", Path(work) / PLANNED_FP8
    planned(PLANNED_FP8, DENSE).write(own)
    for file in dense.glob("tokenizer*"):
        shutil.copy(file, own)
    return {"dense": dense, PLANNED_FP8: own}


def _servers(models: Mapping[str, Path], out: Path) -> Iterator[AbstractContextManager[Running]]:
    """The pairs of servers: one on each GPU, the first of which prefills."""
    types = ("--quantization", FP8["quantization"], "--kv-cache-dtype", FP8["kv_cache_dtype"])
    size = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "8G")
    common = (*types, *size, "--served-model-name", "m", "--no-enable-prefix-caching")
    for number in range(2 * len(_PAIRS)):
        pair, member = divmod(number, 2)
        model, more = list(_PAIRS.values())[pair]
        weights = ["--load-format", "dummy"]
        if model != "dense":
            extra = ["--model-loader-extra-config", '{"weights":"dummy"}']
            weights = ["--load-format", "gac", *extra]
        transfer = ("--kv-transfer-config", json.dumps(_transfer(_ROLES[member])))
        port = _PORT + number
        serve = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(models[model]))
        yield starting_server(
            [*serve, *weights, *common, *more, *transfer, "--port", str(port)],
            {"CUDA_VISIBLE_DEVICES": _GPUS[member]} | _side_channel(number),
            f"http://127.0.0.1:{port}",
            out / f"server-{number}.log",
            _START_SECONDS,
        )


async def _traffic(
    servers: Sequence[str], name: str, rate: float, seconds: float
) -> dict[str, Any]:
    """Requests that arrive at random; the times of each kind of request, in ms."""
    from openai import AsyncOpenAI

    clients = [
        AsyncOpenAI(base_url=f"{server}/v1", api_key="none", timeout=300) for server in servers
    ]
    generator = random.Random(0)
    requests, when = [], 0.0
    while (when := when + generator.expovariate(rate)) < seconds:
        is_long = generator.random() < _LONG[0]
        _, length, output = _LONG if is_long else _SHORT
        prompt = [generator.randrange(DENSE["vocab_size"]) for _ in range(length)]
        requests.append((when, is_long, prompt, output))
    begun = time.monotonic()

    async def one(number: int, when: float, prompt: list[int], output: int) -> list[float]:
        await asyncio.sleep(begun + when - time.monotonic())
        options: dict[str, Any] = {"model": "m", "prompt": prompt, "temperature": 0}
        more: dict[str, Any] = {"ignore_eos": True}
        client = clients[number % 2 if name == _TWO else 0]
        if name in _PAIRS:
            first = 2 * list(_PAIRS).index(name)
            wanted = {"do_remote_decode": True, "do_remote_prefill": False}
            prefilled = await clients[first].completions.create(
                **options, max_tokens=1, extra_body=more | {"kv_transfer_params": wanted}
            )
            more |= {"kv_transfer_params": prefilled.model_dump()["kv_transfer_params"]}
            client = clients[first + 1]
        stream = await client.completions.create(
            **options, max_tokens=output, stream=True, extra_body=more
        )
        times = [time.monotonic() async for part in stream if part.choices]
        return [
            times[0] - begun - when,
            (times[-1] - times[0]) / (output - 1),
        ]

    tasks = [
        asyncio.create_task(one(number, when, prompt, output))
        for number, (when, _, prompt, output) in enumerate(requests)
    ]
    measured = await asyncio.gather(*tasks)
    await asyncio.gather(*(client.close() for client in clients))
    found: dict[str, Any] = {"requests": len(requests)}
    for kind, is_long in (("short", False), ("long", True)):
        of_kind = 1e3 * np.array(
            [m for m, request in zip(measured, requests, strict=True) if request[1] is is_long]
        )
        for column, quantity in enumerate(("ttft", "tpot")):
            found[f"{kind}_{quantity}"] = np.percentile(of_kind[:, column], (50, 95)).tolist()
    return found


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    equal = [
        (
            name,
            found["prompts"],
            found["equal"],
            found["tokens_equal"],
            f"{found['worst']:.3g}",
        )
        for name, found in result["equal"].items()
    ]
    times = [
        (
            rate,
            name,
            found["requests"],
            *(
                ", ".join(f"{value:.1f}" for value in found[f"{kind}_{quantity}"])
                for kind in ("short", "long")
                for quantity in ("ttft", "tpot")
            ),
        )
        for rate, of_rate in result["traffic"].items()
        for name, found in of_rate.items()
    ]
    columns = ("requests/s", "served by", "requests", "short: TTFT", "TPOT", "long: TTFT", "TPOT")
    blocks: list[Block] = [
        f"{origin(result)}. NIXL moves the cache from GPU to GPU of one host.",
    ]
    if equal:
        blocks += [
            "## Is the answer the same?",
            f"Greedy answers of {_OUTPUT} tokens to prompts of {', '.join(map(str, _LENGTHS))} "
            "tokens, asked one by one; equal: every logprob, to the last bit.",
            table(("model", "prompts", "equal", "equal tokens", "logprobs apart"), equal),
        ]
    if times:
        what, _ = REQUESTS[PLANNED_FP8]
        blocks += [
            "## When does it begin?",
            f"Llama-3-8B's shape, random weights, {REQUESTS['planned'][0]}; {what}. Requests "
            f"arrive at random for {result['seconds']:g} s: {_SHORT[0]:.0%} with {_SHORT[1]} "
            f"tokens, answered with {_SHORT[2]}, the others with {_LONG[1]} and {_LONG[2]}. ms, "
            "median and 95th percentile. One server has one GPU, the others have two. One and two "
            "servers are those of the first pair, asked for no transfer.",
            table(columns, times),
        ]
    return document("Prefill on one GPU, decode on another", *blocks)


if __name__ == "__main__":
    main()

"""What healing wins back, by the form of compression and by the tokens it is trained on.

    python -m benchmarks.quality.regain OUT --device cuda [--sizes 30m 130m]

Trains models of the ladder, compresses each by every form to two budgets, and heals each result on
growing numbers of tokens, by `vllm-gac heal` as it is by default. Every model is scored on held-out
text. Rows of models that were healed layer by layer are by commit 340d552, which can do that;
commit bdbe9b4 can compare plans for healing.

Appends to OUT/regain.jsonl after each model, and writes OUT/regain.md anew. What is trained and
compressed lies in --work. The same command goes on where it was stopped. With several GPUs, each
size has its own.

A healed model that is in --work already is only scored. So several GPUs can heal it together: add
their command to its row, as `healed_by`. The row's seconds are then not those of healing.
"""

import argparse
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.common.page import arguments, command_line, machine, source
from benchmarks.quality.ladder.scores import runner, window_losses
from benchmarks.quality.ladder.sizes import SIZES
from benchmarks.quality.ladder.text import read_tensor
from benchmarks.quality.regain_page import COMPRESSED, DENSE, HEALED, page
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.devices import prepare_device
from vllm_gac.errors import NotHealedError, PlanError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.planning.planner import plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate import calibrate
from vllm_gac.steps.calibrate_request import CalibrateRequest
from vllm_gac.steps.compress import compress
from vllm_gac.steps.heal import heal
from vllm_gac.steps.heal_request import HealRequest


@dataclass(frozen=True, slots=True)
class Budget:
    """What a form keeps: shares of the KV cache and of the parameters that its methods change."""

    methods: Sequence[str]
    parameters: float = 1.0
    kv: float = 1.0
    key_form: str = "auto"

    def __str__(self) -> str:
        """As a row names it."""
        kept = {"layers" if self.methods != _PRUNE else "MLP": self.parameters, "KV": self.kv}
        return ", ".join(f"{name} {share}" for name, share in kept.items() if share < 1)

    def request(self, dense: ModelLayout) -> PlanRequest:
        """The same as shares of a model."""
        inside = ".mlp." if self.methods == _PRUNE else ".layers."
        changed = sum(math.prod(s) for name, s in dense.tensors().items() if inside in name)
        return PlanRequest(
            param_ratio=1 - (1 - self.parameters) * changed / dense.parameters,
            kv_ratio=self.kv,
            methods=self.methods,
            key_form=self.key_form,
        )


_PRUNE, _ALL = ("prune",), ("heads", "prune", "lowrank")
# Two each. Models that were trained for minutes lose little by mild ones, and what healing wins of
# little is noise.
FORMS: Mapping[str, Sequence[Budget]] = {
    "rotary heads": (
        Budget(("heads",), kv=0.5, key_form="rotary"),
        Budget(("heads",), kv=0.25, key_form="rotary"),
    ),
    "latent keys": (
        Budget(("heads",), kv=0.5, key_form="latent"),
        Budget(("heads",), kv=0.25, key_form="latent"),
    ),
    "MLP widths": (Budget(_PRUNE, parameters=0.6), Budget(_PRUNE, parameters=0.3)),
    "low rank": (Budget(("lowrank",), parameters=0.6), Budget(("lowrank",), parameters=0.4)),
    "all methods": (Budget(_ALL, parameters=0.6, kv=0.5), Budget(_ALL, parameters=0.4, kv=0.25)),
}
TOKENS = (100_000, 400_000, 1_600_000, 6_400_000)
_MINUTES = {"30m": 1.5, "130m": 5.0}
_PACKAGES = ("torch", "transformers")
# Processes that share a GPU: the models do not fill it.
_WORKERS = 6


@dataclass(frozen=True, slots=True)
class Task:
    """A model to make and to score."""

    size: str
    work: Path
    text: Path
    device: str
    form: str = "none"
    budget: str = "none"
    way: str = DENSE
    tokens: int = 0

    def name(self) -> dict[str, Any]:
        """What tells its row from others."""
        keys = ("size", "form", "budget", "way", "tokens")
        return {key: getattr(self, key) for key in keys}

    @property
    def dense(self) -> Path:
        """The dense model."""
        return self.work / "run" / "model"

    @property
    def compressed(self) -> Path:
        """The compressed model."""
        return self.work / _as_path(f"{self.form}-{self.budget}")


@dataclass(slots=True)
class Rows:
    """The rows that were measured, in a file; several threads add to them."""

    out: Path
    about: Mapping[str, Any]
    lock: Lock = field(default_factory=Lock)

    @property
    def file(self) -> Path:
        """The file of JSON lines."""
        return self.out / "regain.jsonl"

    def lacks(self, task: Task, weights: str) -> bool:
        """Whether there is no row of the task, of a dense model of these weights."""
        wanted = (task.name() | {"weights_sha256": weights}).items()
        return not any(wanted <= row.items() for row in lines_of(self.file))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, and write the page of all."""
        with self.lock:
            append_line(self.file, {**row, **self.about})
            (self.out / "regain.md").write_text(page(lines_of(self.file)), encoding="utf-8")
        said = {key: value for key, value in row.items() if key not in ("losses", "document")}
        print(*said.values(), flush=True)


def main() -> None:
    """Measure what is not there yet, each size in a thread of its own."""
    args = _arguments()
    prepare_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    text = args.text or args.work / "text"
    if not text.exists():
        _run("-m", "benchmarks.quality.ladder", "text", text, "--packages", *args.packages)
    about = {"command": _command(args), **source(args.commit), **machine(args.device)}
    rows = Rows(args.out, about)
    without_a_cut_line(rows.file)
    gpus = _gpus() if args.device == "cuda" else [""]
    with ThreadPoolExecutor(len(args.sizes)) as threads:
        tasks = [
            threads.submit(_measure, size, gpus[number % len(gpus)], text, rows, args)
            for number, size in enumerate(args.sizes)
        ]
        for task in as_completed(tasks):
            task.result()
    print((args.out / "regain.md").read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, help="for models; default: OUT/work")
    parser.add_argument("--text", type=Path, help="what `ladder text` wrote; default: it is made")
    parser.add_argument(
        "--packages", nargs="*", default=list(_PACKAGES), help="whose text is read, if installed"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["30m"])
    parser.add_argument("--minutes", type=float, help="of each training (30m: 1.5, 130m: 5)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument(
        "--strongest", action="store_true", help="only the smaller budget of each form"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--max-tokens", type=int, help="of calibration")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="processes of each size")
    args = parser.parse_args()
    args.work = args.work or args.out / "work"
    return args


def _command(args: argparse.Namespace) -> str:
    usual = {
        "device": "cpu",
        "sizes": ["30m"],
        "minutes": None,
        "forms": list(FORMS),
        "strongest": False,
        "tokens": list(TOKENS),
        "max_tokens": None,
    }
    return command_line("python -m benchmarks.quality.regain OUT", args, usual)


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


def _measure(size: str, gpu: str, text: Path, rows: Rows, args: argparse.Namespace) -> None:
    """Train a model; compress, heal and score it in every way that has no row."""
    task = Task(size, args.work / size, text, args.device)
    minutes = args.minutes or _MINUTES.get(size, 5.0)
    options = ("--text", text, "--minutes", minutes, "--length", 1024, "--device", args.device)
    train = ("train", size, task.work / "run", *options)
    _run("-m", "benchmarks.quality.ladder", *train, gpu=gpu)
    run = read_json(task.work / "run" / "run.json")
    facts = {
        "weights_sha256": run["weights_sha256"],
        "parameters": run["parameters"],
        "trained_tokens": run["trained_tokens"],
    }

    faults: list[BaseException] = []

    def missing(tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if rows.lacks(task, run["weights_sha256"])]

    def measure(tasks: Iterable[Task], pool: ProcessPoolExecutor) -> None:
        running: list[Future[dict[str, Any]]] = [pool.submit(_row, t) for t in missing(tasks)]
        for done in as_completed(running):
            if (fault := done.exception()) is None:
                rows.add(done.result() | facts)
            else:  # the others go on
                faults.append(fault)
                print(f"{size}: {fault!r}", flush=True)

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, spawn, initializer=_begin, initargs=(gpu,)) as pool:
        dense = pool.submit(_row, task) if missing([task]) else None
        pool.submit(_calibrate, task, args.max_tokens).result()
        if dense is not None:
            rows.add(dense.result() | facts)
        measure(_compressed(task, args), pool)
        measure(_healed(task, args), pool)
    if faults:
        raise faults[0]


def _compressed(task: Task, args: argparse.Namespace) -> list[Task]:
    return [
        replace(task, form=form, budget=str(budget), way=COMPRESSED)
        for number in _budgets(args)
        for form in args.forms
        for budget in [FORMS[form][number]]
    ]


def _healed(task: Task, args: argparse.Namespace) -> list[Task]:
    """The runs of few tokens first."""
    found = [
        replace(task, form=form, budget=str(budget), way=HEALED, tokens=tokens)
        for tokens in sorted(args.tokens)
        for number in _budgets(args)
        for form in args.forms
        for budget in [FORMS[form][number]]
    ]
    return [task for task in found if task.compressed.exists()]  # else no plan was within it


def _budgets(args: argparse.Namespace) -> Sequence[int]:
    """Places in `FORMS`, the smaller budget first: most is lost with it, and can be won back."""
    return (1,) if args.strongest else (1, 0)


def _begin(gpu: str) -> None:
    """Take the GPU, before CUDA is initialized; several processes share the cores."""
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(2)


def _calibrate(task: Task, max_tokens: int | None) -> None:
    stats = task.work / "stats.safetensors"
    if not stats.exists():
        texts, request = [task.text / "calibration-0.txt"], CalibrateRequest(max_tokens=max_tokens)
        calibrate(task.dense, texts, stats, request, device=task.device, progress=False)


def _row(task: Task) -> dict[str, Any]:
    """Make the model of the task, and score it."""
    begun, found, made = time.monotonic(), dict[str, Any](), [task.dense]
    try:
        if task.way == COMPRESSED:
            made = [_compress(task)]
            found["expected_loss"] = read_json(made[0] / "plan.json")["expected_loss"]
        elif task.way != DENSE:
            made = _heal(task)
            found["heals"] = [_healing_of(model) for model in made]
    except PlanError as e:
        return task.name() | {"refused": str(e)}
    found["seconds"] = round(time.monotonic() - begun, 2)
    if made:  # else nothing became better
        found |= _scores(task, made[-1])
    for model in made if task.way not in (DENSE, COMPRESSED) else []:
        shutil.rmtree(model)
    return task.name() | found


def _compress(task: Task) -> Path:
    if not task.compressed.exists():
        budget = next(b for b in FORMS[task.form] if str(b) == task.budget)
        request = budget.request(open_checkpoint(task.dense).layout)
        stats = task.work / "stats.safetensors"
        how: dict[str, Any] = {"device": task.device, "resume": True, "progress": False}
        made = plan(task.dense, request, stats)
        compress(task.dense, task.compressed, made, stats=stats, **how)
    return task.compressed


def _heal(task: Task) -> list[Path]:
    """The healed model; nothing if healing made the model no better."""
    out = task.work / _as_path(f"{task.form}-{task.budget}-{task.way}-{task.tokens}")
    texts, request = [task.text / "healing.txt"], HealRequest(tokens=task.tokens)
    how: dict[str, Any] = {"device": task.device, "resume": True, "progress": False}
    with suppress(NotHealedError):
        if not out.exists():
            heal(task.compressed, task.dense, texts, out, request, **how)
        return [out]
    return []


def _healing_of(model: Path) -> dict[str, Any]:
    entry: dict[str, Any] = read_json(model / "config.json")["gac"]["source"]["heal"]
    return {key: entry[key] for key in ("tokens", "learning_rate", "divergence")}


def _scores(task: Task, directory: Path) -> dict[str, Any]:
    windows = read_tensor(task.text, "heldout.safetensors", "windows")
    losses = {"losses": window_losses(runner(directory, task.device), windows)}
    if task.way != DENSE:
        return losses
    document = read_tensor(task.text, "heldout.safetensors", "document")
    return losses | {"document": document.tolist()}


def _run(*command: object, gpu: str = "") -> None:
    """Run Python; a failure ends this thread."""
    own = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    subprocess.run([sys.executable, *map(str, command)], env={**os.environ, **own}, check=True)


def _as_path(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


if __name__ == "__main__":
    main()

"""Trains a model of the ladder; a run that was stopped goes on where it was.

The work is in DIR: checkpoint.safetensors (weights and the optimizer's state in fp32, at the last
evaluation saved), log.jsonl (the learning curve, one JSON object a line) and, at the end, model (a
Hugging Face directory) and run.json (what was trained on what, and the SHA-256 of the weights).
The order of the windows follows from the seed, so that a resumed run takes the same steps: on a CPU
it ends in the same bytes. A GPU is asked for deterministic algorithms.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW

from benchmarks.common.page import machine, source
from benchmarks.quality.ladder.sizes import SIZES, architecture
from benchmarks.quality.ladder.text import read_manifest, read_tensor
from tools.demo_model.llama import Llama
from tools.demo_model.model_directory import save_model
from tools.demo_model.training import (
    Schedule,
    adamw,
    autocast,
    batches,
    descend,
    learning_rate,
    next_token_loss,
    validation_loss,
)
from vllm_gac import demo
from vllm_gac.checkpoint.atomic_files import appearing, write_json, write_tensors
from vllm_gac.checkpoint.strict_json import parse_json
from vllm_gac.errors import GacError

SAVE_SECONDS = 120.0
_EVALUATE_EVERY = 200
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Run:
    """What decides the weights: with the same on the same machine, they are the same.

    Attributes:
        size: The rung.
        rope_theta: The base of RoPE.
        tokens: To train on; the learning rate falls to zero with them.
        minutes: The schedule ends after these minutes of training if the tokens take longer.
        length: Tokens of a window.
        seed: Of the first weights and of the order of windows.
        text_sha256: Of the documents.
    """

    size: str
    rope_theta: float
    tokens: int
    minutes: float
    length: int
    seed: int
    text_sha256: str

    def schedule(self, held: int) -> Schedule:
        """The demo model's training options; `held` tokens are an epoch."""
        rung = SIZES[self.size]
        return Schedule(
            epochs=math.ceil(self.steps / (held // self.length // rung.batch)),
            minutes=self.minutes,
            batch=rung.batch,
            length=self.length,
            lr=rung.lr,
            weight_decay=0.1,
            dropout=0.0,
            seed=self.seed,
        )

    @property
    def steps(self) -> int:
        """Steps that take all `tokens`."""
        return max(1, self.tokens // (SIZES[self.size].batch * self.length))


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the learning curve. Losses are mean cross entropies in nats per token."""

    step: int
    tokens: int
    seconds: float
    learning_rate: float
    train_loss: float
    validation_loss: float


def train(
    directory: Path,
    text: Path,
    run: Run,
    device: str,
    *,
    commit: str | None = None,
    save_seconds: float = SAVE_SECONDS,
    on_point: Callable[[Point], object] = lambda point: None,
) -> Path:
    """Train, or go on with, the model of `run` in `directory`. Returns the model's directory.

    Args:
        directory: Of the run; it may exist if it holds a run of the same options.
        text: The text directory.
        run: What to train.
        device: The torch device.
        commit: Of the sources, where they came without .git.
        save_seconds: A checkpoint is written at an evaluation if the last one is older.
        on_point: Is called with each point, after it is logged.

    Raises:
        GacError: `directory` holds another run, or there is too little text.
    """
    _ask_for_determinism(device)
    out = directory / "model"
    if out.exists():
        return out
    directory.mkdir(parents=True, exist_ok=True)
    tokens = read_tensor(text, "train.safetensors", "train").to(device)
    validation = read_tensor(text, "train.safetensors", "validation").to(device)
    batch = SIZES[run.size].batch
    if len(tokens) < batch * run.length:
        raise GacError(f"{text}: {len(tokens)} tokens, less than one step of {batch * run.length}")
    dims = architecture(run.size, run.rope_theta)
    torch.manual_seed(run.seed)
    model = Llama(dims, dropout=0.0).to(device)
    schedule = run.schedule(len(tokens))
    optimizer = adamw(model, schedule)
    state = _State(model, optimizer, directory / "checkpoint.safetensors", run)
    curve = state.load()
    for point in _descending(model, optimizer, tokens, validation, run, schedule, curve):
        curve.append(point)
        lines = "".join(json.dumps(asdict(point)) + "\n" for point in curve)
        (directory / "log.jsonl").write_text(lines, encoding="utf-8")
        state.save(curve, save_seconds)
        on_point(point)
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    with appearing(out) as partial:
        save_model(model, tokenizer, dims, partial)
        weights = hashlib.sha256((partial / "model.safetensors").read_bytes()).hexdigest()
        about = {
            **asdict(run),
            **asdict(schedule),
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained_tokens": curve[-1].tokens,
            "seconds": curve[-1].seconds,
            "validation_loss": curve[-1].validation_loss,
            "weights_sha256": weights,
            "text": read_manifest(text) | {"held_out_documents": None, "packages": None},
            **source(commit),
            **machine(device),
        }
        write_json(directory / "run.json", about)
        (partial / "README.md").write_text(card(about, curve), encoding="utf-8")
    return out


def _ask_for_determinism(device: str) -> None:
    if device.startswith("cuda"):
        # cuBLAS reads this when the first product is computed.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def _descending(
    model: Llama,
    optimizer: AdamW,
    tokens: Tensor,
    validation: Tensor,
    run: Run,
    schedule: Schedule,
    done: list[Point],
) -> Iterator[Point]:
    """Take the steps that are left, and yield a point after each _EVALUATE_EVERY and the last."""
    step, before = (done[-1].step, done[-1].seconds) if done else (0, 0.0)
    if tokens.is_cuda:
        for layer in model.model.layers:
            layer.compile()  # all layers share what is compiled for the first one
    losses: list[Tensor] = []
    begun, first = time.monotonic(), step + 1
    # Where an earlier run ended its schedule by time, no step is left.
    progress = max(step / run.steps, before / (60 * run.minutes))
    for ids in islice(batches(tokens, schedule), step, None):
        if progress >= 1:
            return
        with autocast(tokens):
            loss = next_token_loss(model, ids)
        step += 1
        progress = max(step / run.steps, (before + time.monotonic() - begun) / (60 * run.minutes))
        rate = learning_rate(schedule, step, progress)
        descend(model, optimizer, loss, rate)
        losses.append(loss.detach())
        if step == first:
            torch.stack(losses).cpu()  # waits: the first step compiles, and does not count
            begun = time.monotonic()
        if step % _EVALUATE_EVERY == 0 or progress >= 1:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            # Its windows are shorter. Compiling for them would take longer than they do.
            with torch.compiler.set_stance("force_eager"):
                validated = validation_loss(model, validation)
            yield Point(
                step=step,
                tokens=step * ids.numel(),
                seconds=round(before + time.monotonic() - begun, 2),
                learning_rate=rate,
                train_loss=mean,
                validation_loss=validated,
            )


class _State:
    """What a run goes on from, in one safetensors file: weights, moments, and the curve so far."""

    def __init__(self, model: Llama, optimizer: AdamW, path: Path, run: Run) -> None:
        self.model, self.optimizer, self.path, self.run = model, optimizer, path, run
        self.saved = time.monotonic()

    def load(self) -> list[Point]:
        """Load the file if there is one. Returns the curve so far."""
        if not self.path.exists():
            return []
        with safe_open(self.path, "pt") as file:
            about = parse_json(file.metadata()["run"].encode(), str(self.path))
            if about["run"] != asdict(self.run):
                raise GacError(
                    f"{self.path}: the checkpoint of another run, {about['run']}; "
                    f"asked for is {asdict(self.run)}; give another directory"
                )
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(file.get_tensor(name))
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(
                            float(about["curve"][-1]["step"]), device=parameter.device
                        ),
                        **{
                            moment: file.get_tensor(f"{name}.{moment}").to(parameter.device)
                            for moment in _MOMENTS
                        },
                    }
        return [Point(**point) for point in about["curve"]]

    def save(self, curve: list[Point], seconds: float) -> None:
        """Write the file unless one was written in the last `seconds`."""
        if time.monotonic() - self.saved < seconds:
            return
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.detach().cpu()
            for moment in _MOMENTS:
                tensors[f"{name}.{moment}"] = self.optimizer.state[parameter][moment].cpu()
        about = {"run": asdict(self.run), "curve": [asdict(point) for point in curve]}
        write_tensors(self.path, tensors, {"format": "pt", "run": json.dumps(about)})
        self.saved = time.monotonic()


def card(about: dict[str, Any], curve: list[Point]) -> str:
    """The model card: what the model is, what it was trained on, and its learning curve."""
    rows = curve[:: max(1, len(curve) // 12)]
    rows = rows if rows[-1] is curve[-1] else [*rows, curve[-1]]
    points = [
        f"| {p.step} | {p.tokens / 1e6:.1f} M | {p.seconds:.0f} | {p.train_loss:.3f} | "
        f"{p.validation_loss:.3f} |"
        for p in rows
    ]
    text = about["text"]
    return "\n".join(
        [
            f"# A Llama of {about['parameters'] / 1e6:.1f} M parameters that writes Python",
            "",
            "A rung of the ladder by which compression is judged; it is not shipped. Trained on",
            "the sources and documents of Python packages under permissive licences,",
            f"{text['train_tokens']:,} tokens ({text['characters'] / 1e6:.0f} MB, of which",
            f"{text['prose_characters'] / 1e6:.1f} MB are documents), split by a hash of paths,",
            f"SHA-256 {about['text_sha256']}.",
            "",
            f"{about['trained_tokens'] / 1e6:.1f} M tokens in {about['seconds']:.0f} s on",
            f"{about['machine']}, torch {about['torch']}, windows of {about['length']} tokens,",
            f"{about['batch']} a step, AdamW, peak rate {about['lr']}, weight decay",
            f"{about['weight_decay']}, cosine, bf16, seed {about['seed']}, RoPE's base",
            f"{about['rope_theta']:.0f}. Weights (bf16), SHA-256 {about['weights_sha256']}.",
            f"Validation perplexity {math.exp(about['validation_loss']):.3f}.",
            "",
            "| step | tokens | seconds | training loss | validation loss |",
            "| --- | --- | --- | --- | --- |",
            *points,
            "",
        ]
    )

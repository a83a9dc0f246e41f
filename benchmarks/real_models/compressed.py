"""The model of a row, made by the command line of vllm-gac, each step a process with a limit."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.real_models.rows import INT4, ROWS, Row
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import GacError

# All rows can be served in FP8 without padding, and fast; weights that are quantized stay as they
# are, and profiles have no times of them.
_CACHE = ("--kv-cache-dtype", "fp8")
_FP8 = ("--quantization", "fp8_per_tensor", *_CACHE, "--gpu", "h200")


@dataclass(frozen=True, slots=True)
class Making:
    """What a model is made of and where.

    Attributes:
        model: The dense model.
        stats: What `vllm-gac calibrate` wrote for it.
        work: Where models are written; one that is there is used. The dense model in W4A16 and its
            statistics are there before rows of it: w4a16, w4a16.safetensors.
        heal_texts: For rows that are healed; what an asked loss is measured on.
        heal_seconds: That healing may take.
        device: The torch device.
        seconds: That each step may take.
        heal_rate: The learning rate of healing; None: its default.
        problems: The directory of HumanEval, for rows that are asked for by a score.
    """

    model: Path
    stats: Path
    work: Path
    heal_texts: Sequence[Path]
    heal_seconds: float
    device: str
    seconds: float
    heal_rate: float | None = None
    problems: Path | None = None

    def make(self, name: str) -> Path:
        """Write the model of a row of ROWS. Raises GacError if a step fails."""
        row = ROWS[name]
        if not row.compressed:
            return self._dense(row)
        out = self.work / directory_name(name.removesuffix(", healed"))
        if not out.exists():
            self._compress(row, out)
        if not row.healed:
            return out
        healed = self.work / directory_name(name)
        if not healed.exists():
            texts = [f"{text}" for text in self.heal_texts]
            rate = [] if self.heal_rate is None else ["--learning-rate", f"{self.heal_rate}"]
            self._run(
                healed,
                *("heal", f"{out}", "--teacher", f"{self._dense(row)}", "--out", f"{healed}"),
                *("--text", *texts, *rate, *self._how),
            )
        return healed

    def _compress(self, row: Row, out: Path) -> None:
        dense, plan = self._dense(row), out.with_suffix(".plan.json")
        stats = ("--stats", f"{dense.with_suffix('.safetensors') if row.int4 else self.stats}")
        plan.unlink(missing_ok=True)
        given = [option.format(problems=self.problems) for option in row.options or ()]
        options = (*given, *(_CACHE if row.int4 else _FP8), *stats)
        if "--max-loss" in options:
            texts = [f"{text}" for text in self.heal_texts]
            held_out = () if "--score" in options else ("--held-out", *texts)
            made = ("--out", f"{out}", *options, *held_out)
        else:
            self._run(out, "plan", f"{dense}", "--out", f"{plan}", *options)
            made = ("--out", f"{out}", "--plan", f"{plan}", *stats)
        self._run(out, "compress", f"{dense}", *made, *self._how)

    def _dense(self, row: Row) -> Path:
        if not row.int4:
            return self.model
        dense = self.work / directory_name(INT4)
        if not dense.exists():
            raise GacError(f"{dense}: missing; `python -m benchmarks.real_models int4` makes it")
        return dense

    @property
    def _how(self) -> tuple[str, ...]:
        return "--device", self.device, "--quiet"

    def _run(self, out: Path, *arguments: str) -> None:
        module = ["vllm_gac"]
        if arguments[0] == "heal":
            module = ["benchmarks.real_models.heal", f"{self.heal_seconds}"]
        command = [sys.executable, "-m", *module, *arguments, "--json"]
        log = out.with_suffix(".log")
        with log.open("a") as output:
            print("$", *command[1:], file=output, flush=True)
            try:
                subprocess.run(
                    command,
                    stdout=output,
                    stderr=output,
                    timeout=self.seconds,
                    check=True,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                )
            except subprocess.TimeoutExpired as e:
                raise GacError(f"{arguments[0]}: not done after {self.seconds:.0f} s") from e
            except subprocess.CalledProcessError as e:
                raise GacError(f"{arguments[0]}: {_last_line(log)}") from e


def directory_name(row: str) -> str:
    """The name of a row as that of a folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in row.lower())


def facts(dense: Path, model: Path) -> dict[str, Any]:
    """What a model keeps, and what it was expected to lose."""
    whole, layout = open_checkpoint(dense).layout, open_checkpoint(model).layout
    about: dict[str, Any] = {
        "parameters": round(layout.parameters / whole.parameters, 4),
        "kv": round(layout.kv_elements / whole.kv_elements, 4),
    }
    config = json.loads((model / "config.json").read_text())
    if "gac" not in config:
        return about
    source = config["gac"]["source"]
    about["compress_measured"] = source.get("measured")
    if asked := source.get("max_loss"):
        about["reached"] = {"tries": len(asked["tried"]), **asked["measured"]}
    if healing := source.get("heal"):
        about |= {"heal_tokens": healing["tokens"], "heal_rate": healing["learning_rate"]}
    plan = model / "plan.json"
    if plan.exists():  # a healed model is another one than was planned
        planned = json.loads(plan.read_text())
        about["expected_loss"] = planned.get("expected_loss")
        about["fp8_keys_loss"] = planned.get("notes", {}).get("fp8_keys_loss")
    return about


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-500:] if lines else "no output"

"""Measures rows on a model: three texts, HumanEval as served, and the engine against the reference.

Each measurement is appended to a file of JSON lines as soon as it is there. One that fails says
why in its place, and the others go on.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.json_lines import append_line, zipped_lines_of
from benchmarks.common.page import machine, source
from benchmarks.real_models.as_served import against_reference, prompt_scores
from benchmarks.real_models.compressed import Making, directory_name, facts
from benchmarks.real_models.engine import SAMPLING, SECONDS, Serving, complete, serving
from benchmarks.real_models.human_eval import passed, question
from benchmarks.real_models.rows import OWN_ATTENTION, ROWS
from vllm_gac.steps.evaluate.compare import Baseline
from vllm_gac.steps.evaluate.perplexity import window_batches
from vllm_gac.texts.tokenizer import ModelTokenizer

TEXTS = ("code", "prose", "answers", "exercises", "tasks")  # those that there are
_LENGTH, _SEQUENCES = 1024, 512


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured of each row.

    Attributes:
        making: How models are made.
        texts: Where TEXT-held-out.jsonl.gz are.
        problems: HumanEval.jsonl.gz.
        out: The directory of rows.jsonl and completions.jsonl.
        precisions: That models are served in, of PRECISIONS.
        max_tokens: Of each text. 0: only what is served is measured.
        samples: Sampled answers to each of them, beside the greedy one.
        windows: How many windows of answers the engine is checked on; 0 for none.
        keep: Whether models stay in `making.work`.
        commit: Of the sources, where they came without .git.
    """

    making: Making
    texts: Path
    problems: Path
    out: Path
    precisions: Sequence[str] = ("bf16", "fp8")
    max_tokens: int = 65_536
    samples: int = 0
    windows: int = 50
    keep: bool = False
    commit: str | None = None

    def measure(self, names: Sequence[str]) -> None:
        """Measure rows of ROWS by their names, in turn."""
        self.making.work.mkdir(parents=True, exist_ok=True)
        files = {text: self.texts / f"{text}-held-out.jsonl.gz" for text in TEXTS}
        baselines = {
            text: Baseline(
                self.making.model,
                [file],
                sequence_length=_LENGTH,
                max_tokens=self.max_tokens,
                device=self.making.device,
            )
            for text, file in files.items()
            if self.max_tokens and file.exists()
        }
        for name in names:
            self._row(name, baselines)

    def _row(self, name: str, baselines: Mapping[str, Baseline]) -> None:
        model = self._recorded(name, "model", lambda: self._made(name))
        if model is None:
            return
        directory = Path(model["directory"])
        if name != OWN_ATTENTION:  # the dense model's
            for text, baseline in baselines.items():
                self._recorded(name, text, lambda of=baseline: asdict(of.compare(directory)))
        for precision in self.precisions:
            self._recorded(name, precision, partial(self._served, name, directory, precision))
        if not self.keep and ROWS[name].compressed:
            shutil.rmtree(self.making.work / directory_name(name), ignore_errors=True)

    def _made(self, name: str) -> dict[str, Any]:
        directory = self.making.make(name)
        return {"directory": f"{directory}"} | facts(self.making.model, directory)

    def _served(self, name: str, directory: Path, precision: str) -> dict[str, Any]:
        """HumanEval, and log probabilities, by one engine."""
        problems = zipped_lines_of(self.problems)
        how = Serving(ROWS[name].compressed, precision, name == OWN_ATTENTION)
        log = self.out / "logs" / f"{directory_name(f'{name}-{precision}')}.log"
        tokens, scores = self.checked_windows(directory) if self.windows else [], []
        begun = time.monotonic()
        questions = [question(problem) for problem in problems]
        sequences = min(_SEQUENCES, max(len(problems) * max(self.samples, 1), 1))
        with serving(name, directory, how, log, sequences=sequences) as engine:
            started = engine.wait(SECONDS)
            if self.windows:
                windows = [ids.tolist() for ids in tokens]
                scores = engine.ask(prompt_scores, seconds=SECONDS, windows=windows)
            answers = complete(engine, questions, temperature=0)
            sampled = complete(engine, questions * self.samples, **SAMPLING) if self.samples else []
        served = time.monotonic() - begun
        solved = passed(problems, [text for text, _, _ in answers])
        append_line(
            self.out / "completions.jsonl",
            {"row": name, "precision": precision, "answers": [text for text, _, _ in answers]},
        )
        result: dict[str, Any] = {
            "passed": "".join("01"[each] for each in solved),
            "pass@1": sum(solved) / len(solved),
            "cut": sum(not stopped for _, _, stopped in answers),
            "tokens": sum(length for _, length, _ in answers),
            "start_seconds": round(started, 1),
            "served_seconds": round(served, 1),
        }
        if self.samples:
            each = passed(problems * self.samples, [text for text, _, _ in sampled])
            by_sample = torch.tensor(each).view(self.samples, len(problems))
            result["samples"] = self.samples
            result["passed_samples"] = by_sample.sum(0).tolist()
            result["mean@1"] = by_sample.double().mean().item()
        if self.windows:
            result["as_served"] = against_reference(scores, directory, tokens, self.making.device)
        return result

    def checked_windows(self, directory: Path) -> list[torch.Tensor]:
        """The first windows of answers, [length] each, that engines are checked on."""
        text = [self.texts / "answers-held-out.jsonl.gz"]
        wanted = self.windows * _LENGTH
        batches, _ = window_batches(
            ModelTokenizer(directory), text, length=_LENGTH, max_tokens=wanted
        )
        return [window for batch in batches for window in batch]

    def _recorded(
        self, name: str, what: str, measure: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any] | None:
        """Append what `measure` returns, or why it fails."""
        begun, measured, failed = time.monotonic(), None, {}
        try:
            measured = measure()
        except Exception as e:
            failed = {"error": f"{type(e).__name__}: {e}"[:1000]}
        seconds = round(time.monotonic() - begun, 1)
        about = source(self.commit) | machine(self.making.device)
        about |= {"model": self.making.model.name, "vllm": metadata.version("vllm")}
        line = {"row": name, "measured": what, "seconds": seconds, **(measured or {}), **failed}
        append_line(self.out / "rows.jsonl", line | about)
        print(f"{name}: {what}, {seconds} s{': ' if failed else ''}{failed.get('error', '')}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return measured

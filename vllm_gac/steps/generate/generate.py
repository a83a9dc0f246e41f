"""Have a dense model write text: answers to prompts, or the prompts, too.

Without prompts, the model writes the user's words after what its chat template puts before them,
and then the answer (Xu et al., "Magpie", ICLR 2025). A model without a template writes texts from
its first token on.
"""

import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, open_dense
from vllm_gac.errors import CheckpointError
from vllm_gac.options import record_of
from vllm_gac.runs.workspace import claimed, partial_of, publish, refuse_existing
from vllm_gac.steps.calibrate.text import given_files, sha256_of, text_files
from vllm_gac.steps.generate.prompts import Prompt, read_prompts
from vllm_gac.steps.generate.request import DEFAULT_TOKENS, GenerateRequest
from vllm_gac.steps.generate.rows import Rows, Written
from vllm_gac.steps.in_process_engine import InProcessEngine, in_process_engine, require_vllm
from vllm_gac.texts.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

_TOP_P = 0.95
# Sequences at a time, on a GPU and on a CPU, and how many times as many are a round.
_ON_GPU, _ON_CPU, _ROUND = 512, 32, 4
# Tokens of a row, before any is written.
_GUESS = 256
# Tokens of a prompt, at most.
_PROMPT = 4096
# After so many that are left out in a row, the run ends.
_PATIENCE = 256
_NO_PROMPT = "no prompt"
# The engine takes what weights and cache need, if that is at most half of a GPU's free memory.
# Else it takes nine tenths, and runs as many sequences at a time as fit.
_HALF, _MOST = 0.5, 0.9


def generate(
    model: str | Path,
    out: str | Path,
    request: GenerateRequest | None = None,
    *,
    prompts: Sequence[str | Path] = (),
    revision: str | None = None,
    progress: bool = True,
) -> Written:
    """Have a dense model write text, by vLLM in this process.

    A row is a line of JSON with `messages`, or with `text` if the model has no chat template. What
    is cut, empty or there already, what has special tokens, and a row of `prompts` that cannot be
    asked, is left out. Finished rows are kept in `out`.partial, and the same call continues it.
    vLLM keeps its memory until the process ends, so call this once per process.

    Args:
        model: Directory of a dense model, or its id on the Hub.
        out: The .jsonl file to write.
        request: How much, and how it is sampled. None: a `GenerateRequest` without any option.
        prompts: Text files with a prompt in each line, .jsonl or .parquet files, or data sets on
            the Hub. Empty: the model writes them.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        progress: Whether to show a progress bar on stderr.

    Returns:
        What was written, and what it cost.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        CheckpointError: The model is not dense, vLLM cannot run it, it cannot write by itself, or
            nothing that it wrote can be kept.
        DiskError: Something is at `out`.
    """
    out, request = Path(out), request or GenerateRequest()
    on_cpu = require_vllm()
    if out.suffix != ".jsonl":
        raise CheckpointError(f"--out {out}: expected a name that ends in .jsonl, as it is read by")
    refuse_existing(out)
    directory = model_directory(model, revision)
    checkpoint = open_dense(directory)
    files, tokenizer = text_files(prompts, "take prompts of"), ModelTokenizer(directory)
    if not files:
        logger.warning(
            "without --prompts the model also writes the questions, which need not be like those "
            "of its users: calibrated on such text alone, a model for code lost far more (see the "
            "guide)"
        )
    record = {"prompts": [sha256_of(file) for file in files], **record_of(request)}
    work = partial_of(out)
    with claimed(work, "generate", {**checkpoint.identity, **record}):
        rows = Rows(work)
        run = _Run(tokenizer, rows, request, files, _length(checkpoint, request), progress)
        run.check()
        begun = time.monotonic() - rows.written.seconds
        # Another seed where a stopped run goes on, or it would write the same again.
        seed = request.seed + rows.written.asked
        arguments = _engine_arguments(checkpoint, request, on_cpu)
        with in_process_engine(directory, progress=progress, seed=seed, **arguments) as engine:
            run.write(engine, _ON_CPU if on_cpu else _ON_GPU, begun)
        if not rows.written.rows:
            if run.refusal and rows.written.left_out == {_NO_PROMPT: rows.written.asked}:
                raise run.refusal
            raise CheckpointError(
                f"{directory}: nothing that it wrote can be kept (left out: "
                f"{left_out(rows.written)}); if answers were cut, give a larger --max-new-tokens"
            )
        publish(rows.path, out)
    return rows.written


def left_out(written: Written) -> str:
    """How much was left out, and why."""
    return ", ".join(f"{count:,} {why}" for why, count in written.left_out.items()) or "nothing"


class _Run:
    """A run that writes rows.

    Args:
        tokenizer: The model's.
        rows: What was written.
        request: How much, and how it is sampled.
        files: Those with prompts.
        length: Tokens of a sequence, at most.
        progress: Whether to show a progress bar.
    """

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        rows: Rows,
        request: GenerateRequest,
        files: Sequence[Path],
        length: int,
        progress: bool,
    ) -> None:
        self._tokenizer, self._rows, self._files, self._length = tokenizer, rows, files, length
        self.refusal: CheckpointError | None = None
        self._progress, self._by_itself = progress, not files
        self._wanted = request.tokens or (math.inf if files else DEFAULT_TOKENS)
        self._given = itertools.islice(
            read_prompts(tokenizer, files), rows.written.asked if files else 0, None
        )
        self._sampling = {
            "temperature": request.temperature,
            "top_p": _TOP_P,
            "max_tokens": request.max_new_tokens,
            "skip_special_tokens": False,  # so that they can be seen
        }

    def check(self) -> None:
        """Raise CheckpointError if nothing can be asked, or a file of prompts cannot be read."""
        for _ in read_prompts(self._tokenizer, given_files(self._files)):
            pass  # before the engine starts, which takes minutes
        if self._by_itself and self._tokenizer.has_template:
            self._tokenizer.user_turn()
        elif self._by_itself:
            Prompt.of_words("", chat=False).ids(self._tokenizer)

    def write(self, engine: InProcessEngine, sequences: int, begun: float) -> None:
        """Write rows, with so many sequences at a time, until there are enough."""
        written, last_row = self._rows.written, self._rows.written.asked
        with tqdm(
            desc="generate",
            unit=" tokens",
            total=None if self._wanted == math.inf else self._wanted,
            initial=written.tokens,
            unit_scale=True,
            disable=not self._progress,
        ) as bar:
            while written.tokens < self._wanted and written.asked - last_row < _PATIENCE:
                before = written.rows, written.tokens
                if not self._round(engine, self._count(sequences), begun):
                    break
                last_row = written.asked if written.rows > before[0] else last_row
                bar.update(written.tokens - before[1])
        if written.rows and written.asked - last_row >= _PATIENCE:
            logger.warning(
                "ended after %s prompts: of the last %s, every answer was left out; in all %s",
                f"{written.asked:,}",
                written.asked - last_row,
                left_out(written),
            )
        elif written.rows and written.tokens < self._wanted < math.inf:
            logger.warning("%s tokens: there are no more --prompts", f"{written.tokens:,}")

    def _count(self, sequences: int) -> int:
        """How many to ask in the next round."""
        written, most = self._rows.written, _ROUND * sequences
        each = written.tokens / written.asked if written.tokens else _GUESS
        left = self._wanted - written.tokens
        return most if left > most * each else max(math.ceil(left / each), sequences // 4)

    def _round(self, engine: InProcessEngine, count: int, begun: float) -> bool:
        """Ask `count` times, and write what is new. Returns False if no prompts are left."""
        written = self._rows.written
        prompts = list(itertools.islice(self._usable(self._asked(engine, count)), count))
        if not prompts and not self._by_itself:
            return False
        short = [each for each in prompts if len(each[-1]) < self._length]
        self._leave_out("prompts too long", len(prompts) - len(short))
        answers = engine.generate([ids for *_, ids in short], **self._sampling)
        new = []
        for (prompt, tokens, _), answer in zip(short, answers, strict=True):
            text, length = self._kept(answer, may_be_cut="text" in prompt.row)
            if text:
                new.append(prompt.answered(text))
                written.tokens += tokens + length
        written.rows += len(new)
        written.asked += count if self._by_itself else 0
        written.seconds = round(time.monotonic() - begun, 1)
        self._rows.add(new)
        return True

    def _usable(
        self, asked: Iterable[tuple[Prompt, int]]
    ) -> Iterator[tuple[Prompt, int, list[int]]]:
        """The same with token ids; what has none is left out."""
        for prompt, tokens in asked:
            self._rows.written.asked += not self._by_itself
            try:
                yield prompt, tokens, prompt.ids(self._tokenizer)
            except CheckpointError as e:
                self.refusal = self.refusal or e
                self._leave_out(_NO_PROMPT)

    def _asked(self, engine: InProcessEngine, count: int) -> Iterable[tuple[Prompt, int]]:
        """Prompts, and how many tokens of each the model wrote: `count`, or all that are given."""
        if not self._by_itself:
            return ((prompt, 0) for prompt in self._given)
        if not self._tokenizer.has_template:
            return [(Prompt.of_words("", chat=False), 0)] * count
        before, end = self._tokenizer.user_turn()
        ids = self._tokenizer.ids(before, begins=False).tolist()
        turns = map(self._kept, engine.generate([ids] * count, **self._sampling, stop=[end]))
        return [(Prompt.of_words(words, chat=True), length) for words, length in turns if words]

    def _kept(self, output: Any, *, may_be_cut: bool = False) -> tuple[str, int]:
        """The text of an output and its tokens; no text if it is left out."""
        completion = output.outputs[0]
        text, length = completion.text, len(completion.token_ids)
        self._rows.written.sampled += length
        text = text if may_be_cut else text.strip()
        if completion.finish_reason == "length" and not may_be_cut:
            self._leave_out("cut")
        elif not text.strip() or any(token in text for token in self._tokenizer.special):
            self._leave_out("empty or with special tokens")
        elif not self._rows.is_new(text):
            self._leave_out("repeated")
        else:
            return text, length
        return "", length

    def _leave_out(self, why: str, count: int = 1) -> None:
        reasons = self._rows.written.left_out
        if count:
            reasons[why] = reasons.get(why, 0) + count


def _length(checkpoint: Checkpoint, request: GenerateRequest) -> int:
    """Tokens of a sequence, at most."""
    return min(checkpoint.config.max_position_embeddings, request.max_new_tokens + _PROMPT)


def _engine_arguments(
    checkpoint: Checkpoint, request: GenerateRequest, on_cpu: bool
) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`."""
    length, sequences = _length(checkpoint, request), _ON_CPU if on_cpu else _ON_GPU
    # In 2 bytes; where there is less room, fewer sequences run at a time.
    cached_tokens = sequences * min(request.max_new_tokens, length) + 2 * length
    cache = 2 * cached_tokens * checkpoint.layout.kv_elements
    memory: dict[str, Any] = {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.01}
    if not on_cpu:
        free, total = torch.cuda.mem_get_info()
        if 2 * checkpoint.layout.parameters + cache > _HALF * free:
            memory = {"gpu_memory_utilization": _MOST * free / total}
    return {"max_model_len": length, "max_num_seqs": sequences, **memory}

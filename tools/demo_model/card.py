"""Writes the model card beside the weights. Its numbers are measured on the shipped directory."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model.corpus import Corpus
from tools.demo_model.perplexity import perplexity
from tools.demo_model.training import Evaluation, History, Schedule

# WINDOW: tokens per window. A test measures only the first FEW_WINDOWS windows, to save time.
WINDOW, FEW_WINDOWS = 1024, 16
_OTHER_WINDOWS = (256, 2048)
_PROMPT = '# Lib/stack.py\n"""A last-in, first-out container."""\n\nclass Stack:\n'
_CURVE_ROWS = 12


def write_card(
    directory: Path,
    corpus: Corpus,
    held_out: str,
    schedule: Schedule,
    history: History,
    device: torch.device,
    command: str,
) -> None:
    """Measure the model in `directory` on the text `held_out` and write README.md there.

    transformers runs the bf16 weights on disk in fp32.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(held_out, add_special_tokens=False, return_tensors="pt").input_ids[0].to(device)

    def logits_of(batch: Tensor) -> Tensor:
        logits: Tensor = model(batch).logits
        return logits

    measured = {window: perplexity(logits_of, ids, window) for window in (WINDOW, *_OTHER_WINDOWS)}
    few = perplexity(logits_of, ids[: FEW_WINDOWS * WINDOW], WINDOW)
    prompt = tokenizer(_PROMPT, return_tensors="pt").to(device)
    sample = model.generate(**prompt, max_new_tokens=96, do_sample=False)[0]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    others = ", ".join(f"{measured[window]:.3f} at {window}" for window in _OTHER_WINDOWS)
    card = _CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        vocab_size=len(tokenizer),
        perplexity=measured[WINDOW],
        window=WINDOW,
        held_out_tokens=len(ids),
        few=few,
        few_windows=FEW_WINDOWS,
        others=others,
        corpus=corpus,
        python=corpus.name.replace("python-", "Python "),
        train=len(corpus.split("train")),
        validation=len(corpus.split("validation")),
        held_out=len(corpus.split("heldout")),
        held_out_bytes=len(held_out.encode()),
        command=command,
        gpu=gpu,
        date=datetime.now(UTC).date(),
        schedule=schedule,
        history=history,
        epoch_tokens=history.tokens_per_epoch / 1e6,
        tokens=history.steps * schedule.batch * schedule.length / 1e6,
        curve=_table(history.curve),
        sample=tokenizer.decode(sample, skip_special_tokens=True),
    )
    (directory / "README.md").write_text(card, encoding="utf-8")
    print(
        f"held-out perplexity {measured[WINDOW]:.3f} (windows of {WINDOW}, {len(ids)} tokens); "
        f"first {FEW_WINDOWS} windows {few:.3f}; {others}"
    )


def _table(curve: Sequence[Evaluation]) -> str:
    """About a dozen evenly spaced rows of the curve, including its end."""
    stride = max(1, round(len(curve) / _CURVE_ROWS))
    rows = curve[::-1][::stride][::-1]
    return "\n".join(
        f"| {e.step} | {e.epoch:.1f} | {e.train_loss:.3f} | {e.validation_loss:.3f} |" for e in rows
    )


_CARD = """\
---
license: apache-2.0
language: code
library_name: transformers
pipeline_tag: text-generation
---
# A small Llama that writes Python

{parameters:.1f} M parameters, trained from scratch on Python's standard library in minutes: large
enough that compression has something to lose, small enough for a laptop's CPU. It completes code;
it does not answer questions, and knows nothing but the standard library. Its chat template turns
what the user says into the docstring of a module, which the model continues with code. It was
trained on windows of {schedule.length} tokens. Greedy or at low temperatures it repeats lines.

A prompt that begins with a line such as `# Lib/queue.py` makes it start a module; others continue
somewhere inside one.

| | |
| --- | --- |
| Held-out perplexity | **{perplexity:.3f}** per token (windows of {window} tokens, all {held_out_tokens} tokens of `heldout.txt`) |
| of the first {few_windows} windows alone | {few:.3f} |
| at other window lengths | {others} |
| Data | {python} standard library, tests included: {train} modules to train on, {validation} to choose the checkpoint, {held_out} held out ({held_out_bytes} bytes) |
| Data, SHA-256 | `{corpus.sha256}` |
| Tokenizer | byte-level BPE, {vocab_size} tokens, from the training modules alone |
| Training | {history.steps} steps of {schedule.batch} x {schedule.length} tokens: {tokens:.0f} M tokens, {history.best.epoch:.1f} epochs of {epoch_tokens:.2f} M to the kept step {history.best.step} |
| Regularization | dropout {schedule.dropout}, weight decay {schedule.weight_decay}, peak learning rate {schedule.lr}, seed {schedule.seed} |
| Hardware | one {gpu}, {history.seconds:.0f} s of training |
| Date | {date} |

Perplexity: exp of the mean cross entropy, non-overlapping windows, no begin token, every token
of a window but its first; computed by transformers in fp32 on these bf16 weights.

## Data and licence
The modules are split by a hash of their paths; modules most of whose lines stand in others are
left out (`corpus.py`). Neither the tokenizer nor training saw the held-out modules. The weights
are under this project's licence, Apache-2.0. The sources are the Python Software Foundation's,
under the PSF License Version 2 (see `NOTICE` in the folder above).

## Training command
```
{command}
```

| step | epoch | training loss | validation loss |
| --- | --- | --- | --- |
{curve}

## A greedy completion
Of a comment, a docstring and `class Stack:`.
```python
{sample}
```
"""  # noqa: E501

"""Train the demo model: `python -m tools.demo_model.train --out DIR`.

This reads Python's standard library, trains a BPE tokenizer and a Llama on it, and writes a Hugging
Face directory with a model card. Seeds are fixed. Two runs on one machine still differ by the
rounding of the GPU's atomics, and in the number of steps if `--minutes` ends the schedule.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from tools.demo_model.card import write_card
from tools.demo_model.corpus import Corpus, join, read_corpus
from tools.demo_model.llama import Architecture, Llama
from tools.demo_model.model_directory import save_model
from tools.demo_model.tokenizer import token_stream, train_tokenizer
from tools.demo_model.training import Schedule, train
from vllm_gac.checkpoint.atomic_files import appearing
from vllm_gac.errors import GacError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument(
        "--corpus", type=Path, help="library directory or .tar.xz (default: this interpreter's)"
    )
    parser.add_argument("--epochs", type=int, default=35)
    parser.add_argument("--minutes", type=float, default=60.0, help="end the schedule after these")
    parser.add_argument("--batch", type=int, default=32, help="windows per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per window")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    schedule = Schedule(**{field.name: getattr(options, field.name) for field in fields(Schedule)})
    written = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python -m tools.demo_model.train", *written])
    try:
        if options.out.exists():
            raise GacError(f"{options.out}: exists already; remove it or write elsewhere")
        corpus = read_corpus(options.corpus)
        run(options.out, corpus, schedule, torch.device(options.device), command)
    except (GacError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def run(out: Path, corpus: Corpus, schedule: Schedule, device: torch.device, command: str) -> None:
    """Train on `corpus`, and write the model directory `out`, which must not exist yet."""
    torch.manual_seed(schedule.seed)
    architecture = Architecture()
    documents = corpus.split("train")
    tokenizer = train_tokenizer(document.text for document in documents)
    tokens = token_stream(tokenizer, (d.text for d in documents)).to(device)
    validating = (d.text for d in corpus.split("validation"))
    validation = token_stream(tokenizer, validating).to(device)
    print(
        f"{corpus.name}: {len(documents)} modules, {len(tokens):,} tokens to train on, "
        f"{len(validation):,} to validate",
        flush=True,
    )
    model = Llama(architecture, schedule.dropout).to(device)
    history = train(model, tokens, validation, schedule)
    heldout = join(corpus.split("heldout"))
    with appearing(out) as partial:
        save_model(model, tokenizer, architecture, partial)
        write_card(partial, corpus, heldout, schedule, history, device, command)


if __name__ == "__main__":
    sys.exit(main())

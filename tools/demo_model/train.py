"""Train the demo model: `python -m tools.demo_model.train --out DIR`.

This reads Python's standard library, trains a BPE tokenizer and a Llama on it, and writes a Hugging
Face directory with a model card. Seeds are fixed. Two runs on one machine still differ by the
rounding of the GPU's atomics, and in the number of steps if `--minutes` ends the schedule.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.card import write_card
from tools.demo_model.corpus import Corpus, Document, join, read_corpus
from tools.demo_model.llama import Architecture, Llama
from tools.demo_model.tokenizer import BOS_ID, EOS_ID, save_tokenizer, train_tokenizer
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
    tokens = _stream(tokenizer, documents, device)
    validation = _stream(tokenizer, corpus.split("validation"), device)
    print(
        f"{corpus.name}: {len(documents)} modules, {len(tokens):,} tokens to train on, "
        f"{len(validation):,} to validate",
        flush=True,
    )
    model = Llama(architecture, schedule.dropout).to(device)
    history = train(model, tokens, validation, schedule)
    heldout = join(corpus.split("heldout"))
    with appearing(out) as partial:
        _save(model, tokenizer, architecture, partial)
        write_card(partial, corpus, heldout, schedule, history, device, command)


def _stream(tokenizer: Tokenizer, documents: Sequence[Document], device: torch.device) -> Tensor:
    """All documents as one stream of ids. Each is between a begin token and an end token."""
    encodings = tokenizer.encode_batch_fast([d.text for d in documents])
    ids = [i for encoding in encodings for i in (*encoding.ids, EOS_ID)]
    return torch.tensor(ids, dtype=torch.int16, device=device)


def _save(model: Llama, tokenizer: Tokenizer, architecture: Architecture, out: Path) -> None:
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    save_tokenizer(tokenizer, out, architecture.max_position_embeddings)
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        # At lower temperatures such a small model repeats lines. Clients can still set their own.
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    for name, content in (
        ("config.json", architecture.hf_config()),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())

"""lm-eval scores and perplexity of model directories that are served; prints Markdown.

    python -m benchmarks.evaluation MODEL... [--held-out FILE]

Serves one model after the other with `vllm serve`. lm-eval runs the tasks of this folder through
the OpenAI API. The perplexity of the held-out text, by default the demo model's, is computed by the
reference, by vLLM in a process of its own, and by that server. Needs `make install-eval`; takes a
few minutes per model on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import origin, provenance
from benchmarks.evaluation import tasks
from loadtest.ab.server import running_server
from vllm_gac import demo

BIN = Path(sys.executable).parent
HERE = Path(__file__).parent
URL = "http://127.0.0.1:8090"
CONTEXT = 1024
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_MININTERVAL": "30"}
SERVER = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(os.cpu_count())}


def main() -> None:
    """Measure all models, then print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evaluation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="a model directory")
    parser.add_argument(
        "--held-out", type=Path, default=demo.HELD_OUT, help="such as heldout.txt of the ladder"
    )
    args = parser.parse_args()
    models: list[Path] = args.models
    for model in models:
        if not (model / "config.json").is_file():
            parser.error(f"{model}: no config.json, so this is no model directory")
    tasks.write_tasks(args.held_out)
    rows = [_row(model, args.held_out) for model in models]
    other = "" if args.held_out == demo.HELD_OUT else f" --held-out {args.held_out.name}"
    about = provenance(f"python -m benchmarks.evaluation MODEL...{other}", "cpu")
    about |= {"machine": f"{about['machine']}, {os.cpu_count()} cores", "vllm": version("vllm")}
    print(f"\n{origin(about)}, lm-eval {version('lm-eval')}.\n")
    records = [{"model": model.name} | row for model, row in zip(models, rows, strict=True)]
    print(*table_of_records(records), sep="\n")


def _row(model: Path, text: Path) -> dict[str, str]:
    """The cells of one model by column."""
    out = tasks.OUT / model.name
    serve = [f"{BIN}/vllm", "serve", f"{model}", "--load-format", "gac", "--enforce-eager"]
    serve += ["--host", "127.0.0.1", "--port", URL.rpartition(":")[2]]
    serve += ["--max-model-len", f"{CONTEXT}", "--served-model-name", "served"]
    row = {
        "perplexity, reference": _perplexity(model, text),
        "vLLM": _perplexity(model, text, "--engine", "vllm"),
    }
    with running_server(serve, SERVER, URL, out / "server.log", patience=600):
        row["server"] = _perplexity(model, text, "--server", URL)
        scores = _lm_eval(model, out)
    for task, metric in (("continuation", "acc"), ("continuation", "acc_norm")):
        score = scores[f"gac_{task}"]
        error = score[f"{metric}_stderr,none"]
        row[f"{task} {metric}"] = f"{score[f'{metric},none']:.3f} ± {error:.3f}"
    row["modules bits_per_byte"] = f"{scores['gac_modules']['bits_per_byte,none']:.4f}"
    return row


def _perplexity(model: Path, text: Path, *by: str) -> str:
    command = [f"{BIN}/vllm-gac", "evaluate", f"{model}", "--text", f"{text}", *by]
    # One token less than the server's context, since it generates one after each prompt.
    answer = json.loads(_run(*command, "--sequence-length", f"{CONTEXT - 1}", "--json"))
    return f"{answer['perplexity']:.4f}"


def _lm_eval(model: Path, out: Path) -> Mapping[str, Any]:
    """Scores by task and metric."""
    arguments = {
        "model": "served",
        "base_url": f"{URL}/v1/completions",
        "tokenizer": model.resolve(),
        "tokenizer_backend": "huggingface",
        "max_length": CONTEXT,
    }
    command = [f"{BIN}/lm-eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", f"{HERE}", "--tasks", "gac_continuation,gac_modules"]
    _run(*command, "--batch_size", "16", "--output_path", f"{out / 'scores.json'}")
    newest = max(out.glob("scores*.json"), key=lambda path: path.stat().st_mtime)
    scores: Mapping[str, Any] = json.loads(newest.read_text())["results"]
    return scores


def _run(*command: str) -> str:
    print("$", *command, file=sys.stderr, flush=True)
    environment = {**os.environ, **OFFLINE}
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()

"""`vllm-gac heal`: train a compressed model to predict what its dense model predicts."""

import argparse
import math
import os
from typing import TYPE_CHECKING, Any

from vllm_gac.cli.options import (
    MODEL,
    TEXTS,
    Verbs,
    above_zero,
    add_json,
    add_restart,
    add_revision,
    add_sequences,
    given,
    on_a_device,
    path,
    positive,
    text_file,
)
from vllm_gac.cli.output import print_json, print_table, serve_hint

if TYPE_CHECKING:
    from vllm_gac.steps.heal import Healed


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "heal",
        help="train a compressed model to predict what its dense model predicts",
        description="Train the compressed model in MODEL to predict what the dense TEACHER "
        "predicts, and write it to the new directory DIR with the same dims. The best weights on "
        "held-out text are written; if none are better than those of MODEL, nothing is.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help=MODEL)
    add_revision(parser)
    parser.add_argument(
        "--teacher", type=path, required=True, metavar="TEACHER", help="the dense model, likewise"
    )
    parser.add_argument(
        "--teacher-revision", metavar="REVISION", help="its branch, tag or commit on the Hub"
    )
    parser.add_argument(
        "--text", nargs="+", type=text_file, required=True, metavar="FILE", help=TEXTS
    )
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="the new one")
    parser.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="train on N tokens, in several passes if the text has fewer; default: the text once",
    )
    parser.add_argument(
        "--held-out",
        nargs="+",
        type=text_file,
        metavar="FILE",
        help="other text, which is only measured; default: sequences of --text that are set aside",
    )
    parser.add_argument(
        "--learning-rate",
        type=above_zero,
        metavar="R",
        help="the highest one; default: 1e-4 for whole weights, 4e-4 for lora, and a share of that "
        "for fewer than 256 steps",
    )
    parser.add_argument(
        "--train",
        choices=("auto", "whole", "lora"),
        help="whole weights, or adapters that are merged in the end; default: whole weights if "
        "the GPU has room for them",
    )
    parser.add_argument(
        "--lora-rank", type=positive, metavar="N", help="the rank of the adapters; default: 32"
    )
    parser.add_argument(
        "--temperature",
        type=above_zero,
        metavar="T",
        help="what logits are divided by before they are compared; default: 1",
    )
    parser.add_argument(
        "--hidden-weight",
        type=above_zero,
        metavar="W",
        help="weight of the distance between hidden states; default: they are not compared",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="tokens of one step, at most all; default: a 256th of all, from 2048 to 65536",
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="keep Adam's averages in host memory: half of what training takes of the GPU, and "
        "slower steps",
    )
    add_sequences(parser)
    add_restart(parser)
    add_json(parser)
    parser.set_defaults(run=run, hint="; the same command with --resume goes on from here")


def run(args: argparse.Namespace) -> int:
    """Heal, and print the scores before and after."""
    if args.lora_rank is not None and args.train == "whole":
        args.usage_error("--lora-rank has no effect with --train whole")

    from vllm_gac.steps.heal import heal

    healed = heal(
        args.model,
        args.teacher,
        args.text,
        args.out,
        revision=args.revision,
        teacher_revision=args.teacher_revision,
        resume=args.resume,
        overwrite=args.overwrite,
        offload=args.offload,
        **on_a_device(args),
        **given(
            args,
            "tokens",
            "held_out",
            "learning_rate",
            "train",
            "lora_rank",
            "temperature",
            "hidden_weight",
            "batch_tokens",
        ),
    )
    if os.environ.get("RANK", "0") != "0":
        return 0  # of the processes that torchrun has started, the first one prints
    if args.json:
        print_json(_as_json(args, healed))
        return 0
    print_table(
        ("on held-out text", "teacher", "before", "healed"),
        [
            (
                "divergence, nats per token",
                "0",
                f"{healed.before.divergence:.4f}",
                f"{healed.after.divergence:.4f}",
            ),
            (
                "perplexity",
                *(
                    f"{_perplexity(loss):.4g}"
                    for loss in (healed.teacher_loss, healed.before.loss, healed.after.loss)
                ),
            ),
        ],
    )
    print(
        f"\n{healed.recovered:.0%} of the divergence is gone after {healed.tokens:,} tokens.\n"
        f"{serve_hint(args.out)}"
    )
    return 0


def _as_json(args: argparse.Namespace, healed: "Healed") -> dict[str, Any]:
    from dataclasses import asdict

    values = asdict(healed)
    values["curve"] = [
        [value if math.isfinite(value) else None for value in point] for point in healed.curve
    ]
    return {"out": str(args.out), **values, "recovered": healed.recovered}


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))

"""`vllm-gac heal`: train a compressed model to predict what its dense model predicts."""

import argparse
import math
import os
from typing import TYPE_CHECKING, Any

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json, print_table, serve_hint
from vllm_gac.steps.heal.request import HealRequest

if TYPE_CHECKING:
    from vllm_gac.steps.heal.heal import Healed


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "heal",
        help="train a compressed model to predict what its dense model predicts",
        description="Train the compressed model in MODEL to predict what the dense TEACHER "
        "predicts, and write it to the new directory DIR with the same dims. The best weights on "
        "held-out text are written; if none are better than those of MODEL, nothing is.",
    )
    options.add_model(parser)
    options.add_path(parser, "--teacher", "TEACHER", "the dense model, likewise", required=True)
    options.add_revision(parser, "--teacher-revision", "its branch, tag or commit on the Hub")
    options.add_texts(parser, "--text", required=True)
    options.add_out(parser)
    options.add_texts(
        parser,
        "--held-out",
        "other text, which is only measured; default: sequences of --text that are set aside",
    )
    options.add_options(HealRequest, {"": parser})
    options.add_device(parser)
    options.add_resume(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Heal, and print the scores before and after."""
    request = options.request_of(args, HealRequest)

    from vllm_gac.steps.heal.heal import heal

    healed = heal(
        args.model,
        args.teacher,
        args.text,
        args.out,
        request,
        held_out=args.held_out or (),
        revision=args.revision,
        teacher_revision=args.teacher_revision,
        resume=args.resume,
        **options.device_arguments(args),
    )
    if os.environ.get("WORLD_SIZE", "1") != "1" and os.environ["RANK"] != "0":
        return 0  # of the processes that torchrun has started, the first one prints
    if args.json:
        print_json(_as_json(args, healed))
        return 0
    scores = healed.before, healed.after
    losses = healed.teacher_loss, *(score.loss for score in scores)
    print_table(
        ("on held-out text", "teacher", "before", "healed"),
        [
            ("divergence, nats per token", "0", *(f"{score.divergence:.4f}" for score in scores)),
            ("perplexity", *(f"{_perplexity(loss):.4g}" for loss in losses)),
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

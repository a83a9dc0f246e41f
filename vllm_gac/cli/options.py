"""Options that several verbs have, and types of option values."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from vllm_gac.alignment.rules import LINEAR_MULTIPLES, STRATEGIES, quantized_as
from vllm_gac.errors import GacError
from vllm_gac.layout.schema import Method

if TYPE_CHECKING:
    from vllm_gac.layout.dims import ModelLayout
    from vllm_gac.planning.planner import Asked

# What `ArgumentParser.add_subparsers` returns.
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_METHODS = get_args(Method)
TEXTS = (
    "files of UTF-8 text, or .jsonl with a 'text' or the 'messages' of a conversation in each line"
)


CALIBRATION_TOKENS = (
    ", in whole sequences, one at least; default: 65536, or 16 for each channel of an MLP if that "
    "is more"
)


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json"""
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def add_quantization(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup", help_text: str
) -> None:
    """How linears will be quantized, for `contract.quantized_as`."""
    parser.add_argument("--quantization", choices=sorted(LINEAR_MULTIPLES), help=help_text)


def add_planning(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Budgets, methods and allowed dims; what is not given is None."""
    group = parser.add_argument_group("what to keep, and how")
    group.add_argument(
        "--param-ratio", type=ratio, metavar="R", help="share of the parameters to keep, 0 to 1"
    )
    group.add_argument(
        "--kv-ratio", type=ratio, metavar="R", help="share of the KV cache to keep, 0 to 1"
    )
    group.add_argument(
        "--method",
        type=methods,
        metavar="M,...",
        help="heads (fewer and smaller key and value heads), prune (narrower MLPs), lowrank "
        "(factorized linears); default: heads,prune",
    )
    group.add_argument("--align", choices=STRATEGIES, help="allowed dims; default: minimal")
    group.add_argument(
        "--gpu", help="profile to plan for: h200, or a profile.json; it need not be this machine's"
    )
    group.add_argument(
        "--key-form",
        choices=("auto", "rotary", "latent"),
        help="how keys are cached; default: auto",
    )
    group.add_argument(
        "--key-group",
        type=int,
        choices=(1, 2),
        help="key heads made one; default: whichever is best",
    )
    group.add_argument(
        "--value-group", type=int, choices=(1, 2), help="value heads made one; likewise"
    )
    group.add_argument(
        "--tp",
        "--tensor-parallel-size",
        "-tp",
        type=positive,
        metavar="N",
        help="align widths for N tensor-parallel GPUs; default: 1",
    )
    add_quantization(
        group,
        "besides dims left as they are, only those that linears quantized so take without "
        "padding; default: any",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        help="besides sizes left as they are, only head sizes that such a cache takes without "
        "padding; default: auto, any",
    )
    group.add_argument(
        "--objective",
        choices=("concave", "linear", "fisher"),
        help="value of a dim: what is measured to be lost without it, or for comparison in "
        "proportion to it as in the GAC paper, scored by losses (linear) or as in PaLU (fisher); "
        "default: concave",
    )
    group.add_argument(
        "--sensitivity",
        choices=("probe", "kfac"),
        help="what low-rank linears are judged by: layers tried out, or gradients; default: probe",
    )
    time = parser.add_argument_group("predicted time of the decoder layers, on --gpu")
    limit = time.add_mutually_exclusive_group()
    limit.add_argument(
        "--latency", type=above_zero, metavar="US", help="at most so many microseconds a step"
    )
    limit.add_argument(
        "--latency-ratio", type=ratio, metavar="R", help="at most this share of the dense model's"
    )
    time.add_argument(
        "--decode-batch", type=positive, metavar="N", help="sequences in a decode step; default: 64"
    )
    time.add_argument(
        "--decode-context", type=positive, metavar="N", help="tokens of each; default: 2048"
    )
    time.add_argument(
        "--prefill-tokens", type=positive, metavar="N", help="in a prefill step; default: 2048"
    )
    return group


_MIX = ("decode_batch", "decode_context", "prefill_tokens")
PLANNING = (
    "param_ratio",
    "kv_ratio",
    "method",
    "align",
    "gpu",
    "key_form",
    "key_group",
    "value_group",
    "tp",
    "quantization",
    "kv_cache_dtype",
    "objective",
    "sensitivity",
    "latency",
    "latency_ratio",
    *_MIX,
)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of those `names` that were given."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def asked(args: argparse.Namespace, dense: "ModelLayout") -> "Asked":
    """What the planning options ask for. Raises ProfileError if the profile cannot be had."""
    from vllm_gac.gpu.latency.layer import BatchMix
    from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
    from vllm_gac.planning.candidates import Dims
    from vllm_gac.planning.knapsack_items import Latency
    from vllm_gac.planning.planner import Asked, dense_microseconds

    latency = None
    if given(args, "gpu", "latency", "latency_ratio", *_MIX):
        latency = Latency(read_profile(args.gpu or DEFAULT_GPU), BatchMix(**given(args, *_MIX)))
    microseconds = args.latency
    if args.latency_ratio is not None and latency is not None:
        microseconds = args.latency_ratio * dense_microseconds(dense, latency)
    quantized = quantized_as(args.quantization, args.kv_cache_dtype == "fp8")
    return Asked(
        dims=Dims(args.align or "minimal", args.gpu, args.tp or 1, quantized),
        methods=tuple(args.method or ("heads", "prune")),
        latency=latency,
        microseconds=microseconds,
        **given(
            args,
            "param_ratio",
            "kv_ratio",
            "key_form",
            "key_group",
            "value_group",
            "objective",
            "sensitivity",
        ),
    )


def add_run(parser: argparse.ArgumentParser, tokens: str) -> None:
    """Options of verbs that run the model on text; what is not given is None.

    `tokens` says how many are used by default, and how they are counted.
    """
    parser.add_argument(
        "--max-tokens",
        type=positive,
        metavar="N",
        help=f"use at most N tokens{tokens}",
    )
    parser.add_argument(
        "--sequence-length", type=positive, metavar="N", help="tokens per sequence; default: 512"
    )
    parser.add_argument(
        "--device",
        type=device,
        metavar="DEVICE",
        help="cpu, cuda or cuda:N; default: cuda if there is a GPU, else cpu",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def on_a_device(args: argparse.Namespace) -> dict[str, Any]:
    """`run_arguments`, with the device that is chosen where none is given."""
    from vllm_gac.compression.devices import default_device

    return {"device": default_device()} | run_arguments(args)


def add_restart(parser: argparse.ArgumentParser) -> None:
    """What to do where there is something at the output, of verbs that write a model directory."""
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a model that vllm-gac wrote; it stays until the new one is whole",
    )


def run_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_run` that were given. Raises GacError if there is no such device."""
    names = ("max_tokens", "sequence_length", "device")
    if args.device is not None and args.device != "cpu":
        _check_cuda(args.device)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return given | {"progress": not args.quiet}


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(_number(int, text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def count(text: str) -> int:
    """An integer of at least 0."""
    value = int(_number(int, text))
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return value


def above_zero(text: str) -> float:
    """A number above 0."""
    value = float(_number(float, text))
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def ratio(text: str) -> float:
    """A number above 0, up to 1."""
    value = float(_number(float, text))
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def methods(text: str) -> list[str]:
    """Names of methods with commas between, each at most once."""
    names = text.split(",")
    for name in names:
        if name not in _METHODS:
            raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(_METHODS)}")
    return list(dict.fromkeys(names))


def device(text: str) -> str:
    """cpu, cuda or cuda:N"""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: choose cpu, cuda or cuda:N")
    return text


def path(text: str) -> Path:
    """A path that the system can have."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def _check_cuda(name: str) -> None:
    import torch

    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise GacError(f"--device {name}: PyTorch {torch.__version__} sees {count} CUDA devices")


def _number(kind: type[int] | type[float], text: str) -> float:
    try:
        return kind(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from e

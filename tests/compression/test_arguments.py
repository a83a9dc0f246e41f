"""From Python anything may come: what is no value of an argument is refused by its name."""

from pathlib import Path
from typing import Any

import pytest

from vllm_gac import (
    CalibrateRequest,
    CompressRequest,
    HealRequest,
    PlanRequest,
    calibrate,
    compress,
    evaluate,
    heal,
)
from vllm_gac.errors import GacError, PlanError

NOWHERE = Path("there-is-no-such-model")
CALLS: dict[str, Any] = {
    "calibrate": lambda **given: calibrate(NOWHERE, [], NOWHERE, **given),
    "compress": lambda **given: compress(NOWHERE, NOWHERE, **given),
    "evaluate": lambda **given: evaluate(NOWHERE, [], **given),
    "heal": lambda **given: heal(NOWHERE, NOWHERE, [], NOWHERE, **given),
    "CalibrateRequest": CalibrateRequest,
    "CompressRequest": CompressRequest,
    "HealRequest": HealRequest,
    "PlanRequest": PlanRequest,
}
COUNTS: tuple[Any, ...] = (float("nan"), -5, 1.5, True, "7", 10**40)
WRONG: dict[str, tuple[str, tuple[Any, ...]]] = {
    "device": ("--device", (7, "evil", "cuda:x", "mps", "cuda:9999", b"cpu")),
    "max_tokens": ("--max-tokens", (*COUNTS, 0)),
    "sequence_length": ("--sequence-length", (*COUNTS, 0)),
    "revision": ("--revision", (7, b"main", "")),
    "methods": ("--method", ("heads", 7, [["heads"]], ("heads", "svd"), ())),
    "train": ("--train", ("both", 7)),
    "param_ratio": ("--param-ratio", (0, 1.01, None)),
    "kv_ratio": ("--kv-ratio", (float("nan"), "0.5")),
    "align": ("--align", ("exact",)),
    "key_group": ("--key-group", (3,)),
    "tensor_parallel_size": ("--tp", (0, 2.0)),
    "quantization": ("--quantization", ("int4",)),
    "max_loss": ("--max-loss", (1,)),
    "latency": ("--latency", (float("inf"), 1e13)),
    "decode_batch": ("--decode-batch", (10**6,)),
    "decode_context": ("--decode-context", (10**8,)),
    "prefill_tokens": ("--prefill-tokens", (10**8,)),
}
TAKEN = {
    "calibrate": "device revision",
    "CalibrateRequest": "max_tokens sequence_length methods",
    "compress": "device revision",
    "CompressRequest": "max_tokens sequence_length",
    "evaluate": "device max_tokens sequence_length revision",
    "heal": "device revision",
    "HealRequest": "sequence_length train",
    "PlanRequest": "param_ratio kv_ratio methods align key_group tensor_parallel_size quantization "
    "max_loss latency decode_batch decode_context prefill_tokens",
}


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, names in TAKEN.items() for name in names.split()]
)
def test_a_wrong_value_is_refused_by_the_name_of_its_argument(call: str, name: str) -> None:
    flag, values = WRONG[name]
    for value in values:
        with pytest.raises(GacError, match=f"^{flag} "):
            CALLS[call](**{name: value})


@pytest.mark.parametrize(
    "given", [{"key_form": "latent"}, {"key_group": 2}, {"value_group": 2}], ids=str
)
def test_what_only_heads_can_do_is_refused_without_them(given: dict[str, Any]) -> None:
    (name,) = given
    flag = f"--{name.replace('_', '-')} "
    with pytest.raises(PlanError, match=f"^{flag}.*prune,lowrank.*heads"):
        PlanRequest(methods=("prune", "lowrank"), **given)
    PlanRequest(methods=("heads", "prune"), **given)
    PlanRequest(methods=("prune",), key_form="rotary", key_group=1, value_group=1)

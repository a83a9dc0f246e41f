"""The benchmark of decode attention: what each row is compared with. Timing is faked."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.common.result import Result
from benchmarks.kernels import decode, stock_attention


class FakeBatch:
    """Ours takes 10 us for dense heads and 20 for latents."""

    calls, bytes = 1, 4_000_000

    def __init__(self, case: decode.Case) -> None:
        self.microseconds = 20.0 if case.latents else 10.0

    def gac(self, only_compile: bool = False) -> float:
        return self.microseconds

    def gac_error(self) -> float:
        return 0.002


def refused() -> float:
    raise ValueError("unsupported head size")


@pytest.mark.parametrize(("keys", "ratio"), [("rotary", 3.0), ("latent", 1.5)])
def test_latents_are_compared_with_the_dense_heads(
    keys: str, ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensors(case: decode.Case, only_compiled: bool = False) -> FakeBatch:
        return FakeBatch(case)

    def microseconds(call: Callable[[], float], calls: int) -> float:
        return call()

    def stock(batch: FakeBatch) -> dict[str, Callable[[], float]]:
        return {"FA3": lambda: 30.0, "FA4": refused, "Triton": lambda: 40.0}

    def provenance(*_: Any, **__: Any) -> dict[str, Any]:
        about = {"command": "x", "commit": "c", "date": "d", "gpu": "g"}
        return {**about, "versions": {}}

    monkeypatch.setattr(decode.Case, "tensors", tensors)
    monkeypatch.setattr(decode, "microseconds", microseconds)
    monkeypatch.setattr(decode, "provenance", provenance)
    monkeypatch.setattr(decode, "compiling_on_all_cores", contextlib.nullcontext)
    monkeypatch.setattr(decode, "warm_up", lambda: None)
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 4.0)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(stock_attention, "stock_kernels", stock)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["decode", str(out), "--stock", "--keys", keys])
    decode.main()
    result = Result.model_validate_json(out.read_text())
    last = dict(zip(result.columns, result.rows[-1], strict=True))
    assert last["vLLM's best / ours"] == ratio
    assert last["reading, us"] == 1.0
    assert last["FA4, us"] is None
    assert last["FA3, us"] == (None if keys == "latent" else 30.0)

"""Prefill in one process and decode in another: the answers of one process, to the last bit."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agreement import PROMPTS
from tests.serving.engines import ENVIRONMENT, OPTIONS, Answers, answer, assert_same, outputs
from tests.serving.models import HETEROGENEOUS, write_model
from tests.support.local_servers import free_port

# Two or three engines share a GPU. OPTIONS has no CUDA graphs, in which nothing could be counted.
_ON_GPU = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
_ANSWER = "PEER ANSWERS "
# Takes what `Peer.ask` sends, a line of JSON a question, and answers each by a line.
_CODE = f"import json, sys; from {__name__} import _serve as serve; "
_CODE += "serve(sys.argv[1], json.loads(sys.argv[2]))"


class Peer:
    """An engine that runs until its `with` block ends."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(
        self, prompts: list[list[int]], tokens: int, transfers: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Have the engine answer all prompts at once; see `_serve` for what it replies.

        `transfers` are vLLM's `kv_transfer_params` of each prompt.
        """
        question = {"prompts": prompts, "tokens": tokens, "transfers": transfers}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._line(_ANSWER))
        reply["answers"] = [(tokens, top) for tokens, top in reply["answers"]]
        return reply

    def answers(self, prompts: list[list[int]], tokens: int = 12) -> Answers:
        """Answers to prompts that are sent one by one, so that no batch rounds otherwise."""
        return [self.ask([prompt], tokens)["answers"][0] for prompt in prompts]

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        raise AssertionError("the engine ended: " + self._log.read_text()[-6000:])


@contextlib.contextmanager
def peer(model: Path, transfer: dict[str, Any] | None = None, **env: str) -> Iterator[Peer]:
    """Start an engine with these arguments of KVTransferConfig; it ends with the `with` block."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(model), json.dumps(transfer)],
                cwd=Path(__file__).parents[2],
                env=os.environ | ENVIRONMENT | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"} | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            yield Peer(process, log)
        finally:
            process.communicate()  # the end of its input ends it


class CountsTokens:
    """An extension of vLLM's worker that counts the tokens that go through the model."""

    model_runner: Any

    def count_tokens(self) -> None:
        """Count from now on."""
        self.counted = 0
        norm = self.model_runner.get_model().model.layers[0].input_layernorm
        norm.register_forward_pre_hook(self._count)

    def tokens_counted(self) -> int:
        """The tokens so far."""
        return self.counted

    def _count(self, _: Any, inputs: Any) -> None:
        self.counted += inputs[0].shape[0]


def _serve(model: str, transfer: dict[str, Any] | None) -> None:
    from vllm import LLM
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.platforms import current_platform

    options = OPTIONS | (_ON_GPU if current_platform.is_cuda() else {})
    config = KVTransferConfig(**transfer) if transfer else None
    counts = f"{CountsTokens.__module__}.{CountsTokens.__name__}"
    llm = LLM(model, kv_transfer_config=config, worker_extension_cls=counts, **options)
    llm.collective_rpc("count_tokens")
    for line in sys.stdin:
        before = llm.collective_rpc("tokens_counted")[0]
        answered = outputs(llm, **json.loads(line))
        reply = {
            "answers": [answer(output) for output in answered],
            "transfers": [output.kv_transfer_params for output in answered],
            "computed": llm.collective_rpc("tokens_counted")[0] - before,
        }
        print(_ANSWER + json.dumps(reply), flush=True)


# A decoder computes the last token of a prompt in a step of its own. A matrix product of one row
# rounds otherwise than one of several. In one process these prompts end in such a step, too: what a
# cached page of 128 tokens does not bring is 96 tokens (max_num_batched_tokens) or 192, and one.
FIRST = PROMPTS[0][: 2 * 96 + 1]
SHARES_A_PAGE = FIRST[:128] + PROMPTS[1][: 96 + 1]
ALONE = PROMPTS[2][: 96 + 1]
EXACT = [FIRST, SHARES_A_PAGE, ALONE, SHARES_A_PAGE]
TOKENS = 12


@pytest.mark.slow
@pytest.mark.needs("nixl")
def test_nixl_transfers_the_cache_of_every_layer_shape(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS)
    with (
        _nixl(tmp_path / "model", "kv_producer") as prefiller,
        _nixl(tmp_path / "model", "kv_consumer") as decoder,
    ):
        exact = [_decoded(prefiller, decoder, prompt) for prompt in EXACT]
        others = [_decoded(prefiller, decoder, prompt) for prompt in PROMPTS]
    with peer(tmp_path / "model") as alone:
        assert exact == alone.answers(EXACT, TOKENS)
        # Their last tokens are computed with others in one process, so the last bits differ.
        assert_same(others, alone.answers(PROMPTS, TOKENS), error=2e-5)


def _nixl(model: Path, role: str) -> AbstractContextManager[Peer]:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        # Seconds that a prompt's pages wait for the decoder; a busy machine takes its time.
        "kv_connector_extra_config": {"kv_lease_duration": 900},
    }
    return peer(model, transfer, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))


def _decoded(prefiller: Peer, decoder: Peer, prompt: list[int]) -> Any:
    """The decoder's answer; of the prompt it computes the last token only."""
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = prefiller.ask([prompt], 1, [remote])
    reply = decoder.ask([prompt], TOKENS, prefilled["transfers"])
    assert reply["computed"] == TOKENS
    return reply["answers"][0]

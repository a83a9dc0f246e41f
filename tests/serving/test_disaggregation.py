"""Prefill in one process and decode in another: the answers of one process, to the last bit."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agreement import PROMPTS
from tests.serving.engines import assert_same
from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.peers import Peer, peer
from tests.support.local_servers import free_port
from vllm_gac.serving.config.kv_transfer import BY_PACKAGE, version_of

# A decoder computes the last token of a prompt in a step of its own. A matrix product of one row
# rounds otherwise than one of several. In one process these prompts end in such a step, too: what a
# cached page of 128 tokens does not bring is 96 tokens (max_num_batched_tokens) or 192, and one.
FIRST = PROMPTS[0][: 2 * 96 + 1]
SHARES_A_PAGE = FIRST[:128] + PROMPTS[1][: 96 + 1]
ALONE = PROMPTS[2][: 96 + 1]
EXACT = [FIRST, SHARES_A_PAGE, ALONE, SHARES_A_PAGE]
TOKENS = 12


def _needs(connector: str, size: str) -> pytest.MarkDecorator:
    package = BY_PACKAGE[connector]
    return pytest.mark.skipif(
        version_of(package.name) != package.version,
        reason=f"needs {package.name}=={package.version}, {size} with what it needs",
    )


@pytest.mark.slow
@_needs("NixlConnector", "130 MB")
def test_nixl_moves_the_cache_of_every_layer_shape(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS)
    _assert_two_processes_answer_as_one(tmp_path / "model")


@pytest.mark.slow
@_needs("NixlConnector", "130 MB")
def test_nixl_moves_the_cache_of_the_compressed_demo_model(compressed_demo: Path) -> None:
    _assert_two_processes_answer_as_one(compressed_demo)


def _assert_two_processes_answer_as_one(model: Path) -> None:
    with _nixl(model, "kv_producer") as prefiller, _nixl(model, "kv_consumer") as decoder:
        exact = [_decoded(prefiller, decoder, prompt) for prompt in EXACT]
        others = [_decoded(prefiller, decoder, prompt) for prompt in PROMPTS]
    with peer(model) as alone:
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
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = prefiller.ask([prompt], 1, [wanted])
    found = decoder.ask([prompt], TOKENS, prefilled["transfers"])
    assert found["computed"] == TOKENS
    return found["answers"][0]


@pytest.mark.slow
@_needs("LMCacheMPConnector", "1 GB")
def test_lmcache_brings_the_cache_of_every_layer_shape_to_another_engine(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS)
    port = free_port()
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mq_timeout": 900,  # seconds; a busy machine takes its time
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }
    # LMCache imports numba, with which vLLM cannot start a CPU worker in the same process.
    own_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    with _lmcache_server(port, tmp_path / "log") as log:
        with peer(tmp_path / "model", transfer, **own_process) as one:
            one.ask([SHARES_A_PAGE], 1)
            while "Stored 128 tokens" not in log.read_text():
                time.sleep(0.1)
            alone = one.ask([SHARES_A_PAGE], TOKENS)  # its own page, in its own prefix cache
        with peer(tmp_path / "model", transfer, **own_process) as other:
            found = other.ask([SHARES_A_PAGE], TOKENS)
    assert found["computed"] == len(SHARES_A_PAGE) - 128 + TOKENS - 1
    assert found["answers"] == alone["answers"]


@contextlib.contextmanager
def _lmcache_server(port: int, log: Path) -> Iterator[Path]:
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--chunk-size", "128"]
    memory = ["--l1-size-gb", "1", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    with log.open("w") as output:
        server = subprocess.Popen([*command, *options, *memory], stdout=output, stderr=output)
    try:
        yield log
    finally:
        server.terminate()
        server.wait()

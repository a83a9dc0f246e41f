"""Prefill in one process and decode in another: the answers of one process, to the last bit."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agreement import PROMPTS
from tests.serving.engines import assert_same
from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.peers import Peer, peer
from tests.support.local_servers import free_port

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
def test_nixl_moves_the_cache_of_every_layer_shape(tmp_path: Path) -> None:
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

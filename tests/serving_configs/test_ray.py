"""Two replicas of a small model under Ray Serve, really started: load, errors, deaths, the end.

One application for all tests; it is stopped, with requests in flight, by the last one.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving_configs.ray_app import (
    START_SECONDS,
    App,
    deploy,
    engine_core,
    serve_run,
    stop,
)
from tests.support.waiting import PATIENCE, wait_until, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.needs("ray")]

MODEL = "m"
RUNNING, FINISHED = "vllm:num_requests_running", "vllm:request_success_total"
LOST = openai.APIError | httpx.HTTPError  # before the answer, and in it
FLAGS = (
    f"--load-format gac --served-model-name {MODEL} --enforce-eager --max-model-len 1024 "
    "--max-num-seqs 8 --kv-cache-memory-bytes 100M --shutdown-timeout 300"
)


def config(model: Path, minimum: int) -> dict[str, Any]:
    scaling = {
        "min_replicas": minimum,
        "max_replicas": 2,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 0,
        "downscale_delay_s": 1,
        "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }
    replica = {
        "name": "Replica",
        "autoscaling_config": scaling,
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 300,
    }
    application = {
        "name": "test",
        "import_path": "serving_configs.ray.app:application",
        "args": {"model": str(model), "flags": FLAGS},
        "deployments": [replica],
    }
    return {"applications": [application]}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    root = tmp_path_factory.mktemp("ray")
    write_model(root / "model", HETEROGENEOUS[:4])
    with serve_run(config(root / "model", minimum=2), root) as running:
        try:
            wait_until(lambda: len(running.metric(RUNNING)) == 2, START_SECONDS, "two replicas")
        except TimeoutError:
            pytest.fail(running.log.read_text()[-6000:])
        yield running


def of_both(app: App, name: str) -> dict[str, float]:
    """The metric of both replicas: one that is busy may be late for a scrape."""
    by_replica: dict[str, float] = {}

    def is_whole() -> bool:
        by_replica.clear()
        by_replica.update(app.metric(name))
        return len(by_replica) == 2

    wait_until(is_whole, PATIENCE, f"{name} of two replicas")
    return by_replica


def are_busy(app: App, requests: int) -> bool:
    """Whether each of two replicas runs so many requests at least."""
    running = app.metric(RUNNING)
    return len(running) == 2 and min(running.values()) >= requests


def complete(app: App, prompt: list[int], tokens: int, stream: bool) -> str:
    """A greedy answer; raises when it is none, or ends before its end."""
    options: Any = {"ignore_eos": True}
    arguments: Any = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if not stream:
        answer = app.client().completions.create(**arguments, extra_body=options)
        return answer.choices[0].text
    parts = list(app.client().completions.create(**arguments, extra_body=options, stream=True))
    assert parts[-1].choices[0].finish_reason == "length", "the stream ended before the answer did"
    return "".join(part.choices[0].text for part in parts)


def test_two_replicas_answer_concurrent_clients(app: App) -> None:
    prompts = [[7 + number, 300, 11] for number in range(4)]
    expected = [complete(app, prompt, 24, stream=False) for prompt in prompts]
    before = of_both(app, FINISHED)
    with ThreadPoolExecutor(24) as pool:
        answers = [
            pool.submit(complete, app, prompts[number % 4], 24, stream=number % 2 == 0)
            for number in range(48)
        ]
    # Batches of different make-up round differently, so greedy answers may part ways; whole they
    # are, and from the same model.
    texts = [answer.result() for answer in answers]
    same = sum(text == expected[number % 4] for number, text in enumerate(texts))
    assert same >= 24, (expected, texts)
    after = of_both(app, FINISHED)
    assert after.keys() == before.keys()
    assert all(after[replica] > before[replica] for replica in after), (before, after)


KILLED: dict[str, Callable[[psutil.Process], psutil.Process]] = {
    "replica": lambda replica: replica,
    "engine core": engine_core,
}


@pytest.mark.parametrize("victim", KILLED)
def test_what_a_killed_replica_answered_ends_in_an_error(app: App, victim: str) -> None:
    # None comes or goes, so each is one of those that will be busy.
    wait_until(lambda: len(app.replicas()) == 2, START_SECONDS, "two replicas and no other")
    known = set(of_both(app, RUNNING))
    with ThreadPoolExecutor(24) as pool:
        flights = [pool.submit(complete, app, [9, n], 600, n % 2 == 0) for n in range(24)]
        wait_until(lambda: are_busy(app, 3), PATIENCE, "both replicas are busy")
        lost = app.replicas()[0]
        its_own = [lost, *lost.children(recursive=True)]
        KILLED[victim](lost).kill()
        outcomes = [_outcome(flight) for flight in flights]  # none hangs
    failed = [outcome for outcome in outcomes if outcome is not None]
    assert 0 < len(failed) < len(outcomes), outcomes
    assert all(isinstance(outcome, LOST) for outcome in failed), failed

    def two_and_one_is_new() -> bool:
        replicas = set(app.metric(RUNNING))
        return len(replicas) == 2 and len(replicas - known) == 1

    # The other one answers all the while, and nothing of the killed one stays.
    assert complete(app, [5, 6], 8, stream=True)
    wait_until_gone(its_own)
    wait_until(two_and_one_is_new, START_SECONDS, "a new replica")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: complete(app, [3, n], 8, stream=True), range(16)))
    assert all(finished > 0 for finished in of_both(app, FINISHED).values())


def _outcome(flight: "Future[str]") -> BaseException | None:
    return flight.exception(timeout=PATIENCE)


def test_a_replica_goes_when_their_answers_are_finished(app: App) -> None:
    before = app.replicas()
    with ThreadPoolExecutor(4) as pool:
        # Few requests, so one replica has to go; both have some, and those are finished.
        flights = [pool.submit(complete, app, [9, n], 900, n % 2 == 0) for n in range(4)]
        wait_until(lambda: are_busy(app, 1), PATIENCE, "both replicas are busy")
        deploy(app, config(app.directory / "model", minimum=1))
        wait_until(lambda: len(app.metric(RUNNING)) == 1, PATIENCE, "one replica leaves")
        assert [_outcome(flight) for flight in flights] == [None] * 4
    wait_until(lambda: len(app.replicas()) == 1, PATIENCE, "its processes end")
    assert app.replicas()[0] in before


def test_the_end_leaves_no_process_and_no_client_waiting(app: App) -> None:
    processes = app.processes()
    with ThreadPoolExecutor(12) as pool:
        flights = [pool.submit(complete, app, [9, n], 600, n % 2 == 0) for n in range(12)]
        wait_until(lambda: sum(app.metric(RUNNING).values()) > 4, PATIENCE, "requests run")
        assert stop(app) == []
        outcomes = [_outcome(flight) for flight in flights]
    assert all(outcome is None or isinstance(outcome, LOST) for outcome in outcomes), outcomes
    assert not any(process.is_running() for process in processes)

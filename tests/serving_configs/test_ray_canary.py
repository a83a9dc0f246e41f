"""The canary under a real Ray Serve, before two sides that run no model."""

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.serving_configs.debian import CONFIGS
from tests.serving_configs.ray_app import START_SECONDS, App, serve_run
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    pytest.importorskip("ray", reason="needs ray: make install-ray")
    config = yaml.safe_load((CONFIGS / "ray" / "canary.yaml").read_text())
    split, *sides = config["applications"]
    for side in sides:
        side["import_path"] = "tests.serving_configs.ray_side:application"
        side["args"] = {"name": side["name"]}
        del side["deployments"]
    port = free_port()
    split["args"] = {"share": 0.5, "address": f"http://127.0.0.1:{port}"}
    split["deployments"][0] |= {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}}
    with serve_run(
        {"applications": [split, *sides]}, tmp_path_factory.mktemp("ray"), port
    ) as running:
        wait_until(lambda: ask(running)["side"], START_SECONDS, "an answer")
        wait_until(
            lambda: {ask(running)["side"] for _ in range(30)} == {"gac", "dense"},
            START_SECONDS,
            "answers of both sides",
        )
        yield running


def ask(app: App, **headers: str) -> Any:
    request = urllib.request.Request(
        f"{app.url}/v1/completions?x=1",
        b"prompt",
        {key.replace("_", "-"): v for key, v in headers.items()},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)


def test_requests_go_to_both_sides_as_they_came(app: App) -> None:
    answers = [ask(app) for _ in range(60)]
    assert {answer["body"] for answer in answers} == {"prompt"}
    assert all(answer["path"].endswith("/v1/completions") for answer in answers)
    sides = Counter(answer["side"] for answer in answers)
    assert min(sides["gac"], sides["dense"]) > 5


def test_a_session_stays(app: App) -> None:
    sides = {}
    for number in range(20):
        name = f"session {number}"
        (sides[name],) = {ask(app, X_Session_Id=name)["side"] for _ in range(3)}
    assert set(sides.values()) == {"gac", "dense"}


def test_a_canary_that_refuses_costs_nobody_an_answer(app: App) -> None:
    assert {ask(app, X_Refuse="1")["side"] for _ in range(20)} == {"dense"}


def test_metrics_say_which_side_they_are_of(app: App) -> None:
    with urllib.request.urlopen(f"{app.url}/metrics", timeout=PATIENCE) as response:
        text = response.read().decode()
    asked = dict(re.findall(r'^asked_total\{variant="(\w+)"\} (\d+)', text, re.M))
    assert set(asked) == {"gac", "dense"}
    assert all(int(count) > 0 for count in asked.values())

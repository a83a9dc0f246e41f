"""A Serve config that cannot work, really run: what `serve run` says of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving_configs.ray_app import START_SECONDS, serve_run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

WRONG: dict[str, dict[str, Any]] = {
    "args.port: unknown; there are `model` and `flags`, which takes what `vllm serve` takes": {
        "model": "m",
        "port": 8001,
    },
    "vllm serve ended with exit code 2: unrecognized arguments: --none": {
        "model": "m",
        "flags": "--load-format gac --none",
    },
}


def test_every_mistake_is_named_in_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: make install-ray")
    applications = [
        {
            "name": f"app{number}",
            "route_prefix": f"/{number}",
            "import_path": "serving_configs.ray.app:application",
            "args": args,
        }
        for number, args in enumerate(WRONG.values())
    ]
    with serve_run({"applications": applications}, tmp_path) as app:

        def said() -> set[str]:
            lines = app.log.read_text().splitlines()
            return {sentence for sentence in WRONG for line in lines if line.endswith(sentence)}

        wait_until(lambda: said() == set(WRONG), START_SECONDS, "all sentences")

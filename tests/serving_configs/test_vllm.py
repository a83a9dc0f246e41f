"""Every flag of serving_configs/vllm is one that this vLLM knows, with a reason beside it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving_configs.programs import CONFIGS

FILES = sorted((CONFIGS / "vllm").glob("*.yaml"))

# vLLM's own parser, as `vllm serve` calls it. It exits with 2 at a flag it does not know.
PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
parsed = [vars(parser.parse_args(["serve", "MODEL", "--config", path])) for path in sys.argv[1:]]
print(json.dumps(parsed, default=lambda x: vars(x) if hasattr(x, "__dict__") else str(x)))
"""


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, Any]]:
    """What `vllm serve MODEL --config FILE` sets, by the name of FILE."""
    pytest.importorskip("vllm")
    run = subprocess.run(
        [sys.executable, "-c", PARSE, *FILES], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    options = json.loads(run.stdout.splitlines()[-1])
    return dict(zip((path.stem for path in FILES), options, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_vllm_parses_every_flag(path: Path, parsed: dict[str, dict[str, Any]]) -> None:
    options = parsed[path.stem]
    for flag, value in yaml.safe_load(path.read_text()).items():
        name, *field = flag.replace("-", "_").split(".")
        got = options[name][field[0]] if field else options[name]
        got = got[0] if isinstance(got, list) else got
        expected = {"auto": -1, "1G": 1 << 30}.get(value, value)
        assert got == expected, flag

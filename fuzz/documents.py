"""The fuzz target for single files: plans, knapsack problems, GPU profiles, statistics, pickles.

An input is the name of its kind, SEPARATOR, and the file. For statistics, the file is the header,
SEPARATOR, and the bytes that are repeated as the numbers. For a pickle, it is the program inside
torch's zip file.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fuzz.framing import SEPARATOR, data_size
from fuzz.mutations import mutated
from tests.checkpoint.pickles.archives import zip_file
from tests.support.model_files import config, write_model
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.statistics_file import check_stats, read_layer_stats, read_tokens
from vllm_gac.errors import GacError, PlanError
from vllm_gac.gpu.latency.layer import BatchMix, layer_microseconds
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.importers.pickled_model import open_pickled_model
from vllm_gac.layout.dims import LINEARS
from vllm_gac.layout.schema import validate
from vllm_gac.planning.knapsack import solve
from vllm_gac.planning.knapsack.problem import KnapsackProblem
from vllm_gac.planning.losses import read_losses
from vllm_gac.planning.plan_file import planned_layout, read_plan


def check(data: bytes, directory: Path) -> bool:
    """Write the file of the input `data` into `directory`, and use it.

    Returns whether the file was accepted. Raises AssertionError if a refusal does not name the
    file, or if the use of an accepted file gives wrong numbers. Unexpected exceptions propagate.
    """
    kind, _, content = data.partition(SEPARATOR)
    use = _KINDS.get(kind.decode("latin-1"))
    if use is None:
        return False
    path = directory / "file.json"
    try:
        use(path, content)
    except GacError as e:
        said = str(e)
    else:
        return True
    # If a problem has no solution, or a profile lacks a time, the error need not name the file.
    assert str(path) in said or kind in (b"problem", b"profile"), said
    assert "Traceback" not in said, said
    assert "\n" not in said, said
    return False


def mutate(data: bytes, limit: int, seed: int, change: Callable[[bytes, int], bytes]) -> bytes:
    """Mutate an input. Its kind stays the same."""
    kind, _, content = data.partition(SEPARATOR)
    left = limit - len(kind) - len(SEPARATOR)
    return kind + SEPARATOR + mutated(content, left, seed, change)


def _model(path: Path) -> Checkpoint:
    """A dense model beside the file. The first call writes it."""
    directory = path.parent / "model"
    if not directory.exists():
        raw = config()
        write_model(directory, raw)
    return open_checkpoint(directory)


def _plan(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    model = _model(path)
    plan = read_plan(path, model)
    json.loads(plan.model_dump_json())  # it is written where work is kept
    layout = planned_layout(model, plan)
    assert layout.parameters <= model.layout.parameters


def _problem(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    problem = validate(KnapsackProblem, read_json(path, PlanError), str(path), PlanError)
    assert math.isfinite(solve(problem).value)


def _profile(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    profile = read_profile.__wrapped__(str(path))  # without the cache
    dense = _model(path).layout
    whole = dense.layers[0]
    low = replace(whole, ranks=MappingProxyType(dict.fromkeys(LINEARS, 8)))
    for layer in (whole, low):
        assert 0 < layer_microseconds(dense, layer, BatchMix(), profile) < math.inf


def _statistics(path: Path, content: bytes) -> None:
    header, _, numbers = content.partition(SEPARATOR)
    size = data_size(header)
    repeated = (numbers or b"\0") * (size // max(1, len(numbers)) + 1)
    path.write_bytes(len(header).to_bytes(8, "little") + header + repeated[:size])
    model = _model(path)
    measured = check_stats(path, model.layout, model.config_sha256)
    losses = read_losses(path, model.layout, measured)
    assert all(math.isfinite(c.sum()) for layer in losses for c in layer.values())
    for index in range(len(model.layout.layers)):
        read_layer_stats(path, measured, index, "cpu")
    read_tokens(path, measured, model.layout, model.config.max_position_embeddings)


def _pickle(path: Path, content: bytes) -> None:
    path.write_bytes(zip_file(content))
    open_pickled_model(path)


_KINDS = {
    "plan": _plan,
    "problem": _problem,
    "profile": _profile,
    "statistics": _statistics,
    "pickle": _pickle,
}

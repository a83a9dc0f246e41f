"""Untrusted statistics: the message of a refusal names the file and the tensor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.support.command import error
from tests.support.dense_models import config, weights, write, write_text
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.measured import HELD, STATISTICS, TOKENS
from vllm_gac.compression.statistics_file import open_statistics
from vllm_gac.errors import CheckpointError, VersionError
from vllm_gac.layout.dims import ValueLayout
from vllm_gac.planning.losses import read_losses
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest

Arrays = dict[str, Any]
COVARIANCE = "layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a dense model and its statistics."""
    directory = tmp_path_factory.mktemp("measured")
    model = write(directory / "model", config())
    text = write_text(directory / "text")
    request = CalibrateRequest(max_tokens=512, sequence_length=64)
    calibrate(model, [text], directory / "stats", request, progress=False)
    return directory


def read(measured: Path, stats: Path) -> None:
    """Read statistics as `plan` and `compress` do."""
    statistics = open_statistics(stats, open_checkpoint(measured / "model"))
    statistics.errors()
    statistics.probes()
    for index in range(2):
        statistics.layer(index, "cpu")
    for name in (TOKENS, HELD):
        statistics.tokens(name)


def contents(stats: Path) -> tuple[Arrays, dict[str, str]]:
    with safe_open(stats, framework="np") as file:
        return load_file(stats), dict(file.metadata())


def test_written_statistics_are_read(measured: Path, tmp_path: Path) -> None:
    read(measured, measured / "stats")
    arrays, metadata = contents(measured / "stats")
    # Others of this format say what models lose in which every layer is a probe.
    save_file(arrays | {"whole": np.ones((6, 8), np.float32)}, tmp_path / "older", metadata)
    read(measured, tmp_path / "older")
    arrays[COVARIANCE].fill(0.0)  # an MLP may have nothing but zeros
    save_file(arrays, tmp_path / "silent", metadata)
    read(measured, tmp_path / "silent")


def filled(name: str, value: float) -> Callable[[Arrays], object]:
    return lambda arrays: arrays[name].fill(value)


def one(name: str, position: int, value: float) -> Callable[[Arrays], object]:
    return lambda arrays: arrays[name].reshape(-1).__setitem__(position, value)


def typed(dtype: str) -> Callable[[Arrays], object]:
    return lambda arrays: arrays.update({COVARIANCE: arrays[COVARIANCE].astype(dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (filled(COVARIANCE, -1.0), f"{COVARIANCE}: a variance is negative"),
        (one(COVARIANCE, 5, np.nan), f"{COVARIANCE}: contains NaN or infinity"),
        (one(COVARIANCE, 5, -np.inf), f"{COVARIANCE}: contains NaN or infinity"),
        (one(COVARIANCE, 1, 1e30), f"{COVARIANCE}: a covariance exceeds what its variances allow"),
        (typed("uint32"), f"{COVARIANCE}: U32 .*, expected F32"),
        (typed("float64"), f"{COVARIANCE}: F64 .*, expected F32"),
        (lambda arrays: arrays.pop(COVARIANCE), f"{COVARIANCE}: missing, expected F32"),
        (one("layers.0.errors.width", 3, np.nan), r"errors\.width: contains NaN"),
        (one("layers.0.errors.width", 3, -1.0), r"errors\.width: less than 0"),
        (one("layers.1.probes", 0, np.inf), r"layers\.1\.probes: contains NaN or infinity"),
        (one("tokens", 0, -1), "tokens: -1 to"),
        (one("tokens", 9, 1 << 20), "tokens: 0 to 1048576, the model has 0 to"),
        (one("held", 0, -1), "held: -1 to"),
    ],
)
def test_invalid_statistics_are_refused(
    change: Callable[[Arrays], object], message: str, measured: Path, tmp_path: Path
) -> None:
    arrays, metadata = contents(measured / "stats")
    change(arrays)
    save_file(arrays, tmp_path / "stats", metadata)
    with pytest.raises(
        CheckpointError, match=f"{tmp_path / 'stats'}: .*{message}.*calibrate again"
    ):
        read(measured, tmp_path / "stats")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": None}, "methods: missing"),
        ({"value_group": None}, "value_group: missing"),
        ({"probe_tokens": None}, "probe_tokens: missing"),
        ({"tokens": None}, "tokens: missing"),
        ({"sequence_length": None}, "sequence_length: missing"),
        ({"methods": "heads,magic"}, "methods: expected some of heads,prune,lowrank, got 'heads,m"),
        ({"value_group": "3"}, "value_group: expected one of"),
        ({"probe_tokens": "-1"}, "probe_tokens: expected a number, got '-1'"),
        ({"probe_tokens": "9" * 30}, "probe_tokens: expected a number"),
        ({"probe_tokens": "\u0663"}, "probe_tokens: expected a number"),
        ({"tokens": "0"}, "tokens: expected one sequence of 64 at least, got 0"),
        ({"tokens": "63"}, "tokens: expected one sequence of 64 at least, got 63"),
        ({"held_tokens": "63"}, "held_tokens: expected one sequence of 64 at least, got 63"),
        ({"format": None}, "statistics of format '1'"),  # the first had no number
        ({"format": "2"}, "statistics of format '2'"),
        ({"format": "5"}, "statistics of format '5'"),
        ({"model_config_sha256": None}, "not statistics that 'vllm-gac calibrate' wrote"),
    ],
)
def test_invalid_metadata_are_refused(
    changes: dict[str, str | None], message: str, measured: Path, tmp_path: Path
) -> None:
    arrays, metadata = contents(measured / "stats")
    changed = {key: text for key, text in (metadata | changes).items() if text is not None}
    save_file(arrays, tmp_path / "stats", changed)
    with pytest.raises((CheckpointError, VersionError), match=f"stats: (metadata: )?{message}"):
        read(measured, tmp_path / "stats")


@pytest.mark.parametrize(
    ("changes", "dims", "message"),
    [
        ({"value_group": 1}, {"value": ValueLayout(1, 16)}, "1 value heads at a time, 2"),
        ({"metrics": ()}, {"ranks": {"self_attn.q_proj": 8}}, r"output of self_attn\.q_proj"),
    ],
)
def test_statistics_that_lack_what_a_plan_needs_are_refused(
    changes: dict[str, Any], dims: dict[str, Any], message: str, measured: Path
) -> None:
    checkpoint = open_checkpoint(measured / "model")
    statistics = open_statistics(measured / "stats", checkpoint)
    fewer = replace(statistics, measured=replace(statistics.measured, **changes))
    smaller = replace(checkpoint.layout.layers[0], **dims)
    with pytest.raises(CheckpointError, match=message):
        fewer.check_target(replace(checkpoint.layout, layers=(smaller,) * 2))


def test_statistics_of_other_weights_are_refused(measured: Path, tmp_path: Path) -> None:
    negative = {name: -tensor for name, tensor in weights(config()).items()}
    other = open_checkpoint(write(tmp_path / "other", config(), tensors=negative))
    with pytest.raises(CheckpointError, match="weights"):
        open_statistics(measured / "stats", other)
    arrays, metadata = contents(measured / "stats")
    del metadata["model_weights_sha256"]  # as statistics were before
    save_file(arrays, tmp_path / "stats", metadata)
    open_statistics(tmp_path / "stats", other)


def test_a_sequence_longer_than_the_context_is_refused(measured: Path) -> None:
    """To refit on a sequence of ten million tokens takes gigabytes."""
    checkpoint = open_checkpoint(measured / "model")
    short = replace(
        checkpoint, config=checkpoint.config.model_copy(update={"max_position_embeddings": 63})
    )
    with pytest.raises(CheckpointError, match=r"sequence_length: 64.* 63"):
        open_statistics(measured / "stats", short).tokens()


def test_statistics_without_text_set_aside_are_read(measured: Path, tmp_path: Path) -> None:
    """As format 3 has them: the probes of the whole model, a divergence and a rise of the loss."""
    arrays, metadata = contents(measured / "stats")
    del arrays["held"]
    old = [arrays.pop(f"layers.{index}.probes").mean(1) for index in range(2)]
    stronger = [np.stack((9 * lost, lost), 1).flatten() for lost in old]
    arrays["probes"] = np.stack([np.stack((lost, 7 * lost), 1) for lost in stronger])
    metadata = {key: text for key, text in metadata.items() if not key.startswith("held")}
    save_file(arrays, tmp_path / "stats", metadata | {"format": "3"})
    checkpoint = open_checkpoint(measured / "model")
    statistics = open_statistics(tmp_path / "stats", checkpoint)
    made = measured_plan(statistics, PlanRequest(kv_ratio=0.5))
    assert "expected_interval" not in made.notes
    losses = read_losses(statistics)
    width = checkpoint.layout.layers[0].intermediate_size * 4 // 5
    assert losses[1]["width"][width] == pytest.approx(old[1][3], rel=1e-4)


@pytest.mark.parametrize("covariances", ["", ",,,", "mlp.down_proj"])
def test_compression_needs_what_its_own_plan_shrinks(
    covariances: str, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays, metadata = contents(measured / "stats")
    save_file(arrays, tmp_path / "stats", metadata | {"covariances": covariances})
    asked = ("--kv-ratio", 0.5, "--param-ratio", 0.9, "--stats", tmp_path / "stats", "--quiet")
    said = error(capsys, "compress", measured / "model", "--out", tmp_path / "out", *asked)
    assert "so that nothing is known of the input of self_attn." in said


def test_covariances_of_few_tokens_are_covariances(measured: Path, tmp_path: Path) -> None:
    """With fewer tokens than features, a covariance is singular. It is rounded like any other."""
    text = write_text(tmp_path / "text")
    request = CalibrateRequest(max_tokens=8, sequence_length=8)
    calibrate(measured / "model", [text], tmp_path / "stats", request, progress=False)
    statistics = open_statistics(tmp_path / "stats", open_checkpoint(measured / "model"))
    for index in range(2):
        stats = statistics.layer(index, "cpu")
        for name in STATISTICS:
            assert torch.linalg.matrix_rank(stats[name], rtol=1e-4) <= 16  # of two neighbours

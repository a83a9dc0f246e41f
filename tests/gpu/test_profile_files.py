"""Profiles by path."""

from pathlib import Path

from vllm_gac.gpu.profile_files import read_profile, write_profile


def test_a_profile_that_is_measured_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for gpu in ("Made Up 1", "Made Up 20"):
        write_profile(path, read_profile("h200").model_copy(update={"gpu": gpu}))
        assert read_profile(str(path)).gpu == gpu
    assert read_profile(str(path)) is read_profile(str(path))

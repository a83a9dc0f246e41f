"""`vllm-gac` on models and data sets of a Hub, by what the environment says of it."""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.support import hub
from tests.support.command import command
from tests.support.dense_models import config, write, write_text
from tests.support.hub import Repository
from vllm_gac.steps.verify import verify

CARD = """---
license: other
license_name: llama3.1
license_link: LICENSE
---
# A model
"""


@pytest.mark.slow
@pytest.mark.needs("datasets")
def test_compress_by_id_with_a_revision_and_again_offline_gives_what_can_be_uploaded(
    tmp_path: Path,
) -> None:
    write(tmp_path / "model", config(intermediate_size=96))
    write(tmp_path / "other", config(intermediate_size=64))
    words = write_text(tmp_path / "train.txt").read_text()
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": words}) + "\n")
    beside = {
        "README.md": CARD.encode(),
        "LICENSE": b"The licence.",
        "USE_POLICY.md": b"The policy.",
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"a pickle",
    }
    v1 = hub.files_of(tmp_path / "model") | beside
    main = hub.files_of(tmp_path / "other")
    asked = (
        *("compress", "org/model", "--revision", "v1", "--param-ratio", "0.8"),
        *("--max-tokens", "2048", "--json", "--sequence-length", "64", "--device", "cpu"),
        *("--method", "prune,heads", "--calibration"),
    )
    with hub.running() as here:
        here.models["org/model"] = Repository({"main": main, "v1": v1}, token="hf_mine")
        here.datasets["org/text"] = Repository(
            {"main": {"train.jsonl": (tmp_path / "train.jsonl").read_bytes()}}
        )
        env = os.environ | here.environment(tmp_path / "home", HF_TOKEN="hf_mine")
        env.pop("HF_HUB_OFFLINE", None)
        data_set = "hf://datasets/org/text"
        once = command(*asked, data_set, "--out", tmp_path / "once", env=env)
        assert once.returncode == 0, once.stderr
        commit = here.models["org/model"].commit("v1")
        assert f"vllm-gac: org/model: revision {commit} in {tmp_path / 'home'}" in once.stderr
    # The Hub is gone.
    env |= {"HF_HUB_OFFLINE": "1"}
    again = command(*asked, tmp_path / "train.jsonl", "--out", tmp_path / "again", env=env)
    assert again.returncode == 0, again.stderr
    weights = [
        {name: raw for name, raw in hub.files_of(tmp_path / made).items() if "model-" in name}
        for made in ("once", "again")
    ]
    assert weights[0] == weights[1] != {}

    made = tmp_path / "once"
    assert verify(made).ok
    raw = json.loads((made / "config.json").read_text())
    assert raw["intermediate_size"] == 96
    assert raw["gac"]["source"]["base_model"] == {"id": "org/model", "revision": commit}
    for name in ("LICENSE", "USE_POLICY.md", "chat_template.jinja", "tokenizer.json"):
        assert (made / name).read_bytes() == v1[name]
        assert not (made / name).is_symlink()
    assert (made / "generation_config.json").exists()
    assert not list(made.glob("*.bin"))
    card = ModelCard.load(made / "README.md")
    assert (card.data.license_name, card.data.base_model) == ("llama3.1", ["org/model"])
    assert f"[org/model](https://huggingface.co/org/model) at revision `{commit}`" in card.text
    assert "tokens in sequences of 64 of hf" in card.text

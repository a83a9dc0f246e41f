"""What a model directory says about itself: its name, its Hub name and its licence."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.hub import HUB_ID, cached_id
from vllm_gac.checkpoint.locate import refuse_escape
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.untrusted_files import read_bounded
from vllm_gac.errors import CheckpointError

# The YAML head of a model card, and the keys about licences in it, whose values are single words.
_FRONT_MATTER = re.compile(r"---\r?\n(.*?\n)---", re.DOTALL)
_LICENCE = re.compile(
    r"""^(license|license_name|license_link):[ \t]*(["']?)([\w.:/+-]{1,200})\2[ \t\r]*$""",
    re.MULTILINE | re.ASCII,
)
_BASE = re.compile(rf"^base_model:[ \t]*(?:\r?\n- )?({HUB_ID})[ \t\r]*$", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{4,64}", re.ASCII)
_CARD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that another model is made from.

    `hub_id` is ORGANIZATION/NAME on the Hub, or None if it is unknown, and `revision` the commit
    there, likewise. `licence` has those of the keys license, license_name and license_link of a
    model card that are known.
    """

    name: str
    hub_id: str | None
    licence: Mapping[str, str]
    revision: str | None = None

    def front_matter(self) -> str:
        """The YAML head of the card of a model that is made from this one."""
        lines = [f"{key}: {value}" for key, value in self.licence.items()]
        if self.hub_id is not None:
            lines += ["base_model:", f"- {self.hub_id}"]
        lines += ["library_name: vllm", "pipeline_tag: text-generation"]
        return "\n".join(("---", *lines, "tags:", "- vllm-gac", "- compressed", "---"))

    def recorded(self) -> dict[str, Any]:
        """What config.json of a model that is made from this one says about it; may be empty."""
        if self.hub_id is None:
            return {}
        return {"base_model": {"id": self.hub_id, "revision": self.revision}}

    def origin(self) -> str:
        """What the card says about where the base model is, if that is known, and its licence."""
        if self.hub_id is None:
            return self._licence_sentence()
        at = f" at revision `{self.revision}`" if self.revision else ""
        where = f"Base model: [{self.hub_id}](https://huggingface.co/{self.hub_id}){at}."
        return f"{where}\n{self._licence_sentence()}"

    def _licence_sentence(self) -> str:
        licence = self.licence.get("license_name") or self.licence.get("license")
        if licence == "other":
            return "The base model's licence applies; its text is in `LICENSE`."
        if licence:
            return f"The base model's licence applies: {licence}."
        return "The base model's licence applies; its directory does not say which that is."


def base_model(checkpoint: Checkpoint) -> BaseModel:
    """What `checkpoint` says about itself.

    A model in a Hub cache has the name that it has on the Hub, any other one that of its directory.
    A model that is already compressed keeps the base model that its card names. The licence is the
    one that the card names, else the LICENSE file.
    """
    directory = checkpoint.directory.resolve()
    hub_id, revision = cached_id(directory) or (None, None)
    name, front = hub_id or _printable(directory.name), _front_matter(directory)
    gac = checkpoint.config.gac
    if gac is not None and (base := _BASE.search(front)):
        hub_id, revision = base[1], _revision(gac.source.get("base_model"), base[1])
    return BaseModel(name, hub_id, _licence(directory, front), revision)


def _revision(recorded: Any, hub_id: str) -> str | None:
    """The commit of `hub_id` that config.json has `recorded`; None if it has not."""
    if not isinstance(recorded, Mapping) or recorded.get("id") != hub_id:
        return None
    commit = recorded.get("revision")
    return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None


def _printable(name: str) -> str:
    """A directory's name, with "?" for characters that must not be in a heading."""
    return "".join(c if c.isalnum() or c in "._+- " else "?" for c in name) or "model"


def _front_matter(directory: Path) -> str:
    """The head of the card in `directory`; empty if there is none that can be read."""
    try:
        refuse_escape(directory, directory / "README.md")
        text = read_bounded(directory / "README.md", CheckpointError, _CARD_BYTES)
    except CheckpointError:
        return ""
    front = _FRONT_MATTER.match(text.decode(errors="replace"))
    return front[1] if front else ""


def _licence(directory: Path, front: str) -> dict[str, str]:
    licence = {key: value for key, _, value in _LICENCE.findall(front)}
    if not licence and (directory / "LICENSE").is_file():
        return {"license": "other", "license_link": "LICENSE"}
    return licence

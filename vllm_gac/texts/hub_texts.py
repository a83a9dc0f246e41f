"""Texts named as the Hub names its files: hf://datasets/ORGANIZATION/NAME[@REVISION][/PATH].

PATH is a folder or a file of the data set.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_gac.checkpoint.hub import HUB_ID, hub_faults
from vllm_gac.errors import CheckpointError, HubError

_DATA_SET = re.compile(rf"hf:/{{1,2}}datasets/({HUB_ID})(?:@([^/@]{{1,200}}))?(?:/(.*))?")


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set on the Hub.

    Attributes:
        name: ORGANIZATION/NAME.
        revision: Its branch, tag or commit. None: main.
        path: A folder or a file in it; empty: all of it.
    """

    name: str
    revision: str | None
    path: str


def local_texts(texts: Sequence[str | Path]) -> list[Path]:
    """Paths of `texts`, in their order; a data set on the Hub is named by its present commit.

    Raises:
        HubError: The Hub does not have a data set, or does not answer.
        CheckpointError: `texts` is one string, whose letters would be taken for files.
    """
    if isinstance(texts, str):
        raise CheckpointError(f"{texts}: is one text, where a list of texts is expected")
    return [_at_commit(text) if is_data_set(text) else Path(text) for text in texts]


def as_given(text: str | Path) -> str:
    """The name of a text as whoever made `text` wrote it: a Path makes one "/" of "hf://"."""
    return text if isinstance(text, str) else re.sub(r"^hf:/(?!/)", "hf://", str(text))


def is_data_set(text: str | Path) -> bool:
    """Whether `text` names a data set on the Hub."""
    return re.match(r"hf:/", str(text)) is not None


def data_set(text: str | Path) -> DataSet:
    """The data set that `text` names. Raises HubError if it is not named as one."""
    match = _DATA_SET.fullmatch(str(text))
    if match is None:
        raise HubError(
            f"{as_given(text)}: expected hf://datasets/ORGANIZATION/NAME, and if need be the "
            "folder or the file in it that is meant"
        )
    return DataSet(match[1], match[2], (match[3] or "").strip("/"))


def _at_commit(text: str | Path) -> Path:
    source = data_set(text)
    commit = source.revision
    if not re.fullmatch(r"[0-9a-f]{40}", commit or ""):
        from huggingface_hub import HfApi

        with hub_faults(source.name, "data set", source.revision, f"{as_given(text)}:"):
            commit = HfApi().dataset_info(source.name, revision=source.revision or "main").sha
    return Path(f"hf://datasets/{source.name}@{commit}", source.path)

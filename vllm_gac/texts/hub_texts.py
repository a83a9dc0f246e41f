"""Texts named as the Hub names its files: hf://datasets/ORGANIZATION/NAME[@REVISION][/PATH].

PATH is a folder or a file of the data set. One file of it is fetched to the Hub's cache, by
huggingface_hub. No code of a data set runs.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from vllm_gac.checkpoint.hub import HUB_ID, hub_faults
from vllm_gac.errors import CheckpointError, HubError
from vllm_gac.errors.shown import shown

logger = logging.getLogger(__name__)

_DATA_SET = re.compile(rf"hf:/{{1,2}}datasets/({HUB_ID})(?:@([^/@]{{1,200}}))?(?:/(.*))?")
_KINDS = (".txt", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
_MAX_NAMED = 8


def local_texts(texts: Sequence[str | Path]) -> list[Path]:
    """The files of `texts` on this machine, in their order.

    Args:
        texts: Paths, and data sets hf://datasets/ORGANIZATION/NAME, of which one file is taken: the
            one that is named behind it, or the first of those for training.

    Raises:
        HubError: The Hub or its cache does not have a data set, or it is not clear which file of it
            is meant.
        CheckpointError: `texts` is one string, whose letters would be taken for files.
    """
    if isinstance(texts, str):
        raise CheckpointError(f"{texts}: is one text, where a list of texts is expected")
    return [_fetched(as_given(text)) or Path(text) for text in texts]


def as_given(text: str | Path) -> str:
    """The name of a text as whoever made `text` wrote it: a Path makes one "/" of "hf://"."""
    return text if isinstance(text, str) else re.sub(r"^hf:/(?!/)", "hf://", str(text))


def is_data_set(text: str | Path) -> bool:
    """Whether `text` names a data set on the Hub."""
    return re.match(r"hf:/", str(text)) is not None


def _fetched(text: str) -> Path | None:
    """The file of the data set `text` in the Hub's cache; None if `text` is a path."""
    if not is_data_set(text):
        return None
    match = _DATA_SET.fullmatch(text)
    if match is None:
        raise HubError(
            f"{text}: expected hf://datasets/ORGANIZATION/NAME, and if need be the folder or the "
            "file in it that is meant"
        )
    from huggingface_hub import hf_hub_download

    name, revision, inside = match[1], match[2], (match[3] or "").strip("/")
    with hub_faults(name, "data set", revision, f"{text}:"):
        file = _chosen(text, _files(name, revision), inside)
        path = hf_hub_download(name, file, repo_type="dataset", revision=revision)
    logger.info("%s: %s in %s", text, file, path)
    return Path(path)


def _files(name: str, revision: str | None) -> list[str]:
    """The files of a data set: what the Hub lists, or without its answer those in its cache."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if not constants.is_offline_mode():
        try:
            return HfApi().list_repo_files(name, repo_type="dataset", revision=revision)
        except HfHubHTTPError:
            raise
        except Exception as e:  # what the transports raise has no common base
            logger.info("%s: the Hub does not answer (%s); looking into its cache", name, e)
    folder = snapshot_download(
        name, repo_type="dataset", revision=revision, allow_patterns=[], local_files_only=True
    )
    return [
        path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()
    ]


def _chosen(text: str, files: Sequence[str], inside: str) -> str:
    """The file `inside` names, or else the first for training of the folder `inside`."""
    if inside in files:
        return inside
    known = sorted(
        file
        for file in files
        if file.lower().endswith(_KINDS) and (not inside or file.startswith(f"{inside}/"))
    )
    known = [file for file in known if "train" in file] or known
    folders = sorted({file.rpartition("/")[0] for file in known})
    if not known:
        raise HubError(
            f"{text}: no {', '.join(_KINDS[:-1])} or {_KINDS[-1]} file; others are not read"
        )
    if len(folders) > 1:
        names = ", ".join(shown(folder or "its top level") for folder in folders[:_MAX_NAMED])
        more = ", and more" if len(folders) > _MAX_NAMED else ""
        raise HubError(f"{text}: has text in {names}{more}; put the one you mean behind it")
    if len(known) > 1:
        logger.info("%s: takes the first of %d files", text, len(known))
    return known[0]

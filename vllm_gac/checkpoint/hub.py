"""Models named by their id on the Hugging Face Hub: found in the Hub's cache, or fetched to it.

huggingface_hub does the work, so its settings hold: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_TOKEN, HF_ENDPOINT and what `hf auth login` has stored. Weights are fetched as safetensors, never
as pickles.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.digests import DIGESTS
from vllm_gac.checkpoint.locate import CONSOLIDATED, OTHERS, TOKENIZER
from vllm_gac.errors import HubError
from vllm_gac.errors.sanitize import sanitize

logger = logging.getLogger(__name__)

# A name on the Hub: an organization and a repository.
HUB_ID = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# Other folders hold other formats of the same weights, and so do consolidated*.safetensors. A
# pattern's * also matches "/".
_NOT_FETCHED = (
    *(f"*/{weights}" for weights in _WEIGHTS),
    *(f"{name}/*" for name in (*TOKENIZER, *OTHERS)),
    *(f"{CONSOLIDATED}*", "*.bin", "*.pt", "*.pth", "*.pkl", "*.gguf"),
)
# Names that end so are files of a model, not ids.
_FILES = (".bin", ".gguf", ".pt", ".pth", ".safetensors")


def model_directory(
    model: str | Path,
    revision: str | None = None,
    *,
    weights: bool = True,
    flag: str = "--revision",
) -> Path:
    """The directory of a model that is named by its path, or by its id on the Hub.

    What exists on this machine is taken before what the Hub has.

    Args:
        model: A path, or ORGANIZATION/NAME.
        revision: A branch, a tag or a commit on the Hub. None: the branch main.
        weights: Whether weights are needed, beside config and tokenizer.
        flag: What sets the revision, for messages.

    Returns:
        `model` itself if it is not an id, else the directory of its revision in the Hub's cache.

    Raises:
        HubError: The Hub or its cache does not have the model, `revision` cannot be a name, or
            `model` is a path, which has no revisions.
    """
    name = str(model)
    if revision is not None and (
        not isinstance(revision, str) or not revision.strip() or not revision.isprintable()
    ):
        raise HubError(
            f"{flag} {sanitize(repr(revision))}: not the name of a branch, tag or commit; give "
            f"one, or leave {flag} out for main"
        )
    if os.path.lexists(name):
        if revision is not None:
            raise HubError(
                f"{flag} {sanitize(revision)}: {name} is on this machine, where a model has one "
                f"revision; leave {flag} out, or rename what is at {name} to get the Hub's"
            )
        if is_hub_id(name) and (Path(_cache()) / f"models--{name.replace('/', '--')}").is_dir():
            logger.info("%s: the directory is used, not the Hub's model of that name", name)
        return Path(model)
    return _snapshot(name, revision, weights, flag) if is_hub_id(name) else Path(model)


def is_hub_id(name: str) -> bool:
    """Whether `name` could be a model on the Hub, ORGANIZATION/NAME."""
    return re.fullmatch(HUB_ID, name) is not None and not name.endswith(_FILES)


def cached_id(directory: Path) -> tuple[str, str] | None:
    """Id and commit of .../models--ORGANIZATION--NAME/snapshots/COMMIT; None for other paths."""
    if directory.parent.name != "snapshots":
        return None
    kind, _, name = directory.parent.parent.name.partition("--")
    hub_id = name.replace("--", "/", 1)
    known = kind == "models" and re.fullmatch(HUB_ID, hub_id)
    return (hub_id, directory.name) if known else None


def _snapshot(hub_id: str, revision: str | None, weights: bool, flag: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    needed = ["config.json", *TOKENIZER, *(_WEIGHTS if weights else ())]
    options: dict[str, Any] = {"revision": revision, "ignore_patterns": [*_NOT_FETCHED]}
    with hub_faults(hub_id, "model", revision, flag):
        try:
            every = [*needed, *OTHERS, "README.md", DIGESTS]
            snapshot = snapshot_download(hub_id, allow_patterns=every, **options)
        except LocalEntryNotFoundError:
            # Without the Hub's answer. vLLM fetches config, tokenizer and weights alone.
            options["local_files_only"] = True
            snapshot = snapshot_download(hub_id, allow_patterns=needed, **options)
    directory = Path(snapshot)
    if weights and not any(directory.glob("*.safetensors")):
        raise HubError(
            f"{hub_id}: no *.safetensors at its top level ({directory}), and no other weights are "
            f"fetched; of a model in pickles, 'hf download {hub_id} --local-dir DIR', and give DIR"
        )
    logger.info("%s: revision %s in %s", hub_id, directory.name, directory)
    return directory


@contextmanager
def hub_faults(name: str, kind: str, revision: str | None, flag: str) -> Iterator[None]:
    """Turn what huggingface_hub raises about the `kind` of repository `name` into a HubError."""
    from huggingface_hub import constants, errors

    at = f" at revision {sanitize(revision)}" if revision is not None else ""
    place = f"{constants.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{name}"
    log_in = "log in with 'hf auth login', or set HF_TOKEN"
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as e:
        raise HubError(
            f"{name}: is gated, and the Hub does not let you have it; accept its terms at {place}, "
            f"then {log_in}"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise HubError(
            f"{name}: neither a path on this machine nor a {kind} that you may see at "
            f"{constants.ENDPOINT}; check the name, and for a private one {log_in}"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise HubError(
            f"{flag} {sanitize(revision)}: {name} has no such branch, tag or commit; "
            f"see {place}/tree/main"
        ) from e
    except errors.LocalEntryNotFoundError as e:
        missing = f"{name}{at}: not on this machine, and not whole in the Hub's cache at {_cache()}"
        if constants.is_offline_mode():
            raise HubError(
                f"{missing}; HF_HUB_OFFLINE forbids to fetch it: set HF_HUB_OFFLINE=0, or HF_HOME "
                "to where the cache is"
            ) from e
        raise HubError(
            f"{missing}; {constants.ENDPOINT} does not answer: connect to it, set HF_HOME to where "
            "the cache is, or give a directory"
        ) from e
    except Exception as e:  # the Hub's other answers, and what its transports raise
        reason = str(e).strip().splitlines()[0] if str(e).strip() else ""
        raise HubError(
            f"{name}{at}: cannot be fetched from {constants.ENDPOINT} to {_cache()} "
            f"({type(e).__name__}: {reason}); try again, or give what is on this machine"
        ) from e


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)

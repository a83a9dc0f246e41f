"""Where the files of a model directory are: the first of the three steps of opening it.

The weights are the files that vLLM's loader would read: those in the index, or without an index
every `*.safetensors`. A directory without any may have state dicts, pytorch_model*.bin. For a
directory that is no such model, the error says what it is.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize

_SUFFIX, _WHOLE = ".safetensors", "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Mistral's own files begin with it. Their tensors have other names, and are often beside the same
# weights in Hugging Face's files.
CONSOLIDATED = "consolidated"
# Any of these may be what a model's tokenizer is made of.
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
)
# The folder of the chat templates beside the default one, as transformers has it.
TEMPLATES = "additional_chat_templates"
# Defaults of generation, chat templates, and what a licence wants to be passed on.
OTHERS = (
    "generation_config.json",
    "chat_template*",
    f"{TEMPLATES}/*.jinja",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
# The largest tokenizers have 35 MB.
MAX_AUXILIARY_BYTES = 128 << 20
MAX_SHARDS = 1024
_GGUF = (
    "a GGUF file, which vllm-gac does not read; start from the safetensors model that it was made "
    "from, in bf16"
)
_ADAPTER = (
    "this is a LoRA adapter, not a model; merge it into its base model (in PEFT: "
    "merge_and_unload, then save_pretrained), or serve it beside that one with --lora-modules"
)
_MISTRALS_OWN = (
    "this model has Mistral's own layout (consolidated*.safetensors, params.json), whose tensors "
    "have other names; take it in the format of Hugging Face (config.json, model*.safetensors), "
    "which is usually in the same repository, or write it: 'python "
    "convert_ministral3_weights_to_hf.py DIR OUT', a script in transformers' sources "
    "(src/transformers/models/ministral3; in mistral and mistral3 are those for older models)"
)


@dataclass(frozen=True, slots=True)
class Weights:
    """The files with the weights of a model.

    Attributes:
        directory: Where they are.
        files: Their names, sorted.
        index: The index of them; None if there is none.
        listed: The file of each tensor, as the index has it; empty without an index.
    """

    directory: Path
    files: tuple[str, ...]
    index: Path | None = None
    listed: Mapping[str, str] = field(default_factory=dict)


def locate_config(directory: Path) -> Path:
    """The config.json of a model. Raises CheckpointError if `directory` is no model directory."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {not_a_directory(directory)}")
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise CheckpointError(f"{directory}: {_without_config(directory)}")
    refuse_escape(directory, path)
    return path


def locate_weights(directory: Path) -> Weights:
    """The files with the weights of a model.

    Raises CheckpointError if there are none, if one is a link out of the directory, or if the index
    names a file elsewhere.
    """
    names = sorted(path.name for path in directory.glob("*"))
    files = [n for n in names if n.endswith(_SUFFIX) and not n.startswith(CONSOLIDATED)]
    if not any(_SUFFIX in name for name in names):
        files = state_dict_files(directory)
    index, listed = directory / INDEX_FILE, dict[str, str]()
    if index.name in names:
        refuse_escape(directory, index)
        listed = _listed(index)
        files = sorted(set(listed.values()))
    if len(files) > MAX_SHARDS:
        raise CheckpointError(f"{directory}: more than {MAX_SHARDS} shards, the most that are read")
    if not set(files) - {"adapter_model.safetensors"}:
        raise CheckpointError(f"{directory}: {without_weights(directory)}")
    if listed and _WHOLE in names and _WHOLE not in files:
        raise CheckpointError(
            f"{directory / _WHOLE}: is beside {index.name}, which does not list it, and engines "
            "differ in which of the two they read; remove what is old"
        )
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{directory / 'adapter_config.json'}: a LoRA adapter lies beside the model; merge it "
            "(in PEFT: merge_and_unload, then save_pretrained), or move it away for the base alone"
        )
    for file in files:
        refuse_escape(directory, directory / file)
        if not (directory / file).exists():
            raise CheckpointError(
                f"{directory / file}: missing, though {index.name} lists it; fetch the model again"
            )
    return Weights(directory, tuple(files), index if listed else None, listed)


def auxiliary_files(source: Path) -> list[Path]:
    """Tokenizer, generation config, chat templates and licence of the model in `source`.

    Raises CheckpointError for a link out of `source`, because its target is not part of the model.
    """
    files = [
        path for pattern in (*TOKENIZER, *OTHERS) for path in source.glob(pattern) if path.is_file()
    ]
    for path in files:
        refuse_escape(source, path)
    return sorted(files)


def tokenized_by_mistral(directory: Path) -> bool:
    """Whether vLLM makes the tokens of this model with mistral-common, not with transformers.

    It does if Mistral's own weights and tokenizer are there. Of a snapshot from the Hub these
    weights are not fetched. A gac model's config.json says what it was made of. Raises
    CheckpointError for a config.json that cannot be read.
    """
    config = directory / "config.json"
    if (gac := read_json(config).get("gac")) is not None:
        source = gac.get("source", {}) if isinstance(gac, dict) else None
        if not isinstance(source, dict):
            raise CheckpointError(
                f"{config}: gac: expected an object whose source is an object, got "
                f"{sanitize(gac)}; fetch or write the model again"
            )
        return bool(source.get("tokenizer_mode") == "mistral")
    own = directory.parent.name == "snapshots" or any(
        directory.glob(f"{CONSOLIDATED}*.safetensors")
    )
    return own and any(any(directory.glob(name)) for name in ("tekken.json", "tokenizer.model.v*"))


def state_dict_files(directory: Path) -> list[str]:
    """The names of the state dicts in `directory` as transformers names them, sorted."""
    return sorted(path.name for path in directory.glob("pytorch_model*.bin"))


def refuse_escape(directory: Path, path: Path) -> None:
    """Raise CheckpointError if `path` is a link out of `directory`.

    The blobs of a Hugging Face cache count as inside: all files of its snapshots are links to
    blobs, and so are the files that older versions of `hf download --local-dir` wrote.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    if target.is_relative_to(root):
        return
    if target.parent.name == "blobs" and target.parent.parent.name.startswith("models--"):
        return
    raise CheckpointError(
        f"{path}: links to {target}, outside the model directory; to use what it links to, copy "
        f"the files themselves: cp -rL {shlex.quote(str(directory))} COPY"
    )


def not_a_directory(path: Path) -> str:
    """What `path` is, where a model directory is expected."""
    if path.suffix == ".gguf" and path.is_file():
        return f"this is {_GGUF}"
    if path.is_file():
        return "this is a file, not a directory; give the model directory that it is in"
    what = "this is not a directory" if path.exists() else "there is no such directory"
    return f"{what}; give a model directory, or a model on the Hub as ORGANIZATION/NAME"


def without_weights(directory: Path) -> str:
    """What `directory` is, if it has no weights in a format that we read."""
    return _not_ours(directory) or (
        "there are no *.safetensors files and no pytorch_model*.bin; 'vllm-gac import FILE OUT' "
        "takes a state dict of another name (.pt, .pth, .bin)"
    )


def _without_config(directory: Path) -> str:
    """What `directory` is, if it has no config.json."""
    if (reason := _not_ours(directory)) is not None:
        return reason
    if (directory / "params.json").exists():
        return (
            "there is a params.json but no config.json, so this model has its makers' own layout, "
            "whose tensors have other names; take it in the format of Hugging Face"
        )
    if (directory / "snapshots").is_dir():
        return (
            "this is a folder of the Hub's cache, not a model; give the directory of a revision, "
            "which is in its folder snapshots"
        )
    return "there is no config.json, so this is no model"


def _not_ours(directory: Path) -> str | None:
    """What kind of model `directory` holds, if it is one that we do not read."""
    if (directory / "adapter_config.json").exists():
        return _ADAPTER
    if any(directory.glob("*.gguf")):
        return f"this directory holds {_GGUF}"
    if any(directory.glob(f"{CONSOLIDATED}*.safetensors")):
        return _MISTRALS_OWN
    return None


def _listed(index: Path) -> dict[str, str]:
    """The file of each tensor in an index."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map is missing, empty or not an object")
    for name, file in listed.items():
        if (
            not isinstance(file, str)
            or not file.endswith(_SUFFIX)
            or not file.isprintable()
            or "/" in file
            or "\\" in file
        ):
            raise CheckpointError(
                f"{index}: {sanitize(name)}: {sanitize(repr(file))} is not the name of a {_SUFFIX} "
                "file in the model directory; move the file there, and say so in the index"
            )
    return listed

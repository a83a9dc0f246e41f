"""What a healing reads: the model, its teacher and the text; and all that is refused about them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.open import Checkpoint, open_dense
from vllm_gac.checkpoint.writer import fingerprint
from vllm_gac.compression.reference_model import refuse_unknown_tokens
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.healing.balance import rate_unit
from vllm_gac.healing.student import may_change
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.steps.calibrate.text import sha256_of, text_files, warn_of_no_conversation
from vllm_gac.steps.heal.request import HealRequest
from vllm_gac.steps.model_run import refuse_broken
from vllm_gac.steps.packed import attention_of_changed
from vllm_gac.steps.rewritten import refuse_mixed, refuse_quantized
from vllm_gac.texts.token_text import pack_documents, read_documents
from vllm_gac.texts.tokenizer import ModelTokenizer

# Tokens that are measured: a share of those that are trained on, within limits.
_HELD_OUT_SHARE = 32
_MIN_HELD_OUT, _MAX_HELD_OUT = 1 << 12, 1 << 16
# The tokens of few texts have more characters on average.
_CHARACTERS_OF_A_TOKEN = 8
_ALL = 1 << 62


@dataclass(frozen=True, slots=True)
class HealInputs:
    """What a healing reads.

    Attributes:
        student: The compressed model.
        teacher: The dense model that it was made of.
        trained: Token ids [count, length] to train on.
        measured: Token ids [count, length] that are only measured.
        unit: The `rate_unit` of the teacher.
        is_trained: Whether a tensor of the student is trained, by its name.
        record: What tells a run that goes on whether these are still the same.
    """

    student: Checkpoint
    teacher: Checkpoint
    trained: torch.Tensor
    measured: torch.Tensor
    unit: float
    is_trained: Callable[[str], bool]
    record: dict[str, Any]

    @classmethod
    def open(
        cls,
        directory: Path,
        teacher: Path,
        text: Sequence[str | Path],
        held_out: Sequence[str | Path],
        request: HealRequest,
    ) -> "HealInputs":
        """Open all of them. Raises CheckpointError if one cannot be used."""
        student, dense = _student(directory), open_dense(teacher)
        _check_teacher(student, dense)
        is_trained = _trained(student, dense)
        texts, held_out_texts = text_files(text, "heal on"), text_files(held_out, "measure")
        sums, held_out_sums = (
            [sha256_of(path) for path in paths] for paths in (texts, held_out_texts)
        )
        _check_held_out(held_out_texts, held_out_sums, sums)
        contexts = (model.config.max_position_embeddings for model in (student, dense))
        length = min(request.sequence_length, *contexts)
        tokenizer = ModelTokenizer(directory)
        warn_of_no_conversation(tokenizer, texts, "heal on", teacher)
        trained, measured = _sequences(
            student, tokenizer, texts, held_out_texts, length, request.tokens
        )
        record = {
            "model": fingerprint(student),
            "teacher": fingerprint(dense),
            "text": sums,
            "held_out": held_out_sums,
            # A chat template may write the date; another tokenizer makes other tokens.
            "tokens_sha256": [
                hashlib.sha256(ids.numpy().tobytes()).hexdigest() for ids in (trained, measured)
            ],
        }
        with dense.reader() as read:
            unit = rate_unit(dense.layout, read)
        return cls(student, dense, trained, measured, unit, is_trained, record)

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.trained.shape[1]


def _student(directory: Path) -> Checkpoint:
    """The model to heal. Raises CheckpointError if it cannot be healed."""
    format, student = open_any_format(directory)
    refuse_broken(student)
    if format == "dense":
        raise CheckpointError(f"{directory}: is dense: nothing was lost that could be healed")
    refuse_mixed(student, "heal")
    if student.layout.experts:
        raise CheckpointError(
            f"{directory}: healing holds a layer's weights and their gradients, and was not tried "
            "with experts; serve it as it is"
        )
    return student


def _check_teacher(student: Checkpoint, teacher: Checkpoint) -> None:
    """Raise CheckpointError unless `student` may have been made of `teacher`."""
    for what, ours, theirs in (
        ("layers", len(student.layout.layers), len(teacher.layout.layers)),
        ("numbers in a hidden state", student.layout.hidden_size, teacher.layout.hidden_size),
        ("tokens in the vocabulary", student.layout.vocab_size, teacher.layout.vocab_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{teacher.directory}: is not the model that {student.directory} was made of: "
                f"{theirs} {what}, the compressed model has {ours}; give the right --teacher (a "
                "model whose hidden states or vocabulary were padded is healed before it is padded)"
            )
    made_of = student.config.gac.source.get("model_weights_sha256") if student.config.gac else None
    if made_of not in (None, teacher.weights_sha256):
        raise CheckpointError(
            f"{teacher.directory}: is not the model that {student.directory} was made of: its "
            "weights are others than gac.source.model_weights_sha256 in config.json says; give "
            "the right --teacher"
        )
    mine, dense, head_dim = student.config, teacher.config, teacher.layout.head_dim
    frequencies = [inverse_frequencies(config.rope, head_dim) for config in (mine, dense)]
    same_rope = torch.equal(*frequencies) and all(
        getattr(mine.rope, name) == getattr(dense.rope, name)
        for name in ("magnitude", "llama_4_scaling_beta", "layers")
    )
    eps = mine.rms_norm_eps, dense.rms_norm_eps
    for what, of_student, of_teacher, same in (
        ("model_type", mine.model_type, dense.model_type, mine.model_type == dense.model_type),
        ("RoPE", mine.rope, dense.rope, same_rope),
        ("rms_norm_eps", *eps, eps[0] == eps[1]),
    ):
        if not same:
            raise CheckpointError(
                f"{teacher.directory}: is not the model that {student.directory} was made of: its "
                f"{what} is {sanitize(of_teacher)}, the compressed model's {sanitize(of_student)}; "
                "give the right --teacher"
            )
    tokenizer = teacher.directory / "tokenizer.json"
    if tokenizer.is_file() and (
        ModelTokenizer(teacher.directory).vocabulary()
        != ModelTokenizer(student.directory).vocabulary()
    ):
        raise CheckpointError(
            f"{tokenizer}: numbers its tokens otherwise than {student.directory}; give the right "
            "--teacher"
        )


def _trained(student: Checkpoint, teacher: Checkpoint) -> Callable[[str], bool]:
    """What is trained: of a quantized model what compression has unpacked, so that all else stays.

    The norm before it stays, too: what it could do, q, k and v do. Raises CheckpointError if
    nothing was unpacked.
    """
    if student.quantization is None:
        return may_change
    names = {*filter(may_change, attention_of_changed(teacher.layout, student.layout))}
    if not names or not names.isdisjoint(student.packed):
        refuse_quantized(student, "heal")
    return names.__contains__


def _check_held_out(paths: Sequence[Path], sums: Sequence[str], trained: Sequence[str]) -> None:
    """Raise CheckpointError if a text is both trained on and measured."""
    if not paths and len(set(trained)) < len(trained):
        raise CheckpointError(
            "a --text is given twice; what is set aside of one of them would be trained on in the "
            "other: give it once, with more --tokens for several passes, or give --held-out"
        )
    for path, digest in zip(paths, sums, strict=True):
        if digest in trained:
            raise CheckpointError(
                f"{path}: is given as --held-out and has the bytes of a --text; what is trained on "
                "cannot tell whether the model has become better: give other text, or leave out "
                "--held-out"
            )


def _sequences(
    student: Checkpoint,
    tokenizer: ModelTokenizer,
    texts: Sequence[Path],
    held_out: Sequence[Path],
    length: int,
    tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, length] to train on, and to measure."""
    if length < 2:
        raise CheckpointError("sequences of 1 token: none can be predicted; make them longer")

    def read(files: Sequence[Path], max_tokens: int | None) -> torch.Tensor:
        characters = None if max_tokens is None else max_tokens * _CHARACTERS_OF_A_TOKEN
        documents = read_documents(tokenizer, files, characters)
        tokens_read = pack_documents(
            tokenizer, documents, length=length, max_tokens=max_tokens or _ALL
        )
        refuse_unknown_tokens(student.layout, tokens_read)
        return tokens_read

    if held_out:
        rows = read(texts, tokens)
        return rows, read(held_out, _held_out_tokens(tokens or rows.numel()))
    rows = read(texts, None if tokens is None else tokens + _held_out_tokens(tokens))
    count = _held_out_tokens(min(rows.numel(), tokens or rows.numel())) // length
    count = min(max(count, 1), len(rows) // 2)
    if not count:
        raise CheckpointError(
            f"{', '.join(map(str, texts))}: one sequence of {length} tokens; one to train on and "
            "one to measure are needed: give longer texts, --held-out or shorter sequences"
        )
    # From the middle of each of as many equal parts of the text.
    measured = [(2 * part + 1) * len(rows) // (2 * count) for part in range(count)]
    aside = torch.zeros(len(rows), dtype=torch.bool)
    aside[measured] = True
    return rows[~aside], rows[aside]


def _held_out_tokens(tokens: int) -> int:
    return min(max(tokens // _HELD_OUT_SHARE, _MIN_HELD_OUT), _MAX_HELD_OUT)

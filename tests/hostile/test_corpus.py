"""Every file of the fuzzer's corpus is read once, so faults that it found do not come back."""

import random
from pathlib import Path

import pytest

from fuzz import documents
from fuzz.framing import SEPARATOR
from fuzz.models import check
from fuzz.mutations import mutated
from fuzz.seeds import CORPUS, seed
from fuzz.seeds import documents as document_seeds
from tests.hostile.formats import CONFIGS

MODELS, DOCUMENTS = CORPUS / "models", CORPUS / "documents"
INPUTS = sorted(path.name for path in MODELS.iterdir())
FILES = sorted(path.name for path in DOCUMENTS.iterdir())


@pytest.mark.parametrize("name", INPUTS)
def test_it_is_read_or_refused(name: str, tmp_path: Path) -> None:
    check((MODELS / name).read_bytes(), tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_seed_is_in_the_corpus_and_accepted(name: str, tmp_path: Path) -> None:
    assert (MODELS / name).read_bytes() == seed(name)
    assert check(seed(name), tmp_path)


def test_mutations_stay_two_texts_within_the_limit_and_differ() -> None:
    def flip(data: bytes, limit: int) -> bytes:
        return bytes([data[0] ^ 1, *data[1:]])[:limit] if data else b"x"

    data = seed("palu")
    mutants = [mutated(data, 4000, number, flip) for number in range(300)]
    assert all(len(mutant) <= 4000 for mutant in mutants)
    assert sum(SEPARATOR in mutant for mutant in mutants) > 290
    assert len(set(mutants)) > 200
    assert mutated(data, 4000, 5, flip) == mutated(data, 4000, 5, flip)


@pytest.mark.parametrize("name", CONFIGS)
def test_some_mutants_of_a_seed_are_read_or_refused(name: str, tmp_path: Path) -> None:
    chance = random.Random(name)
    data = seed(name)
    for _ in range(60):
        mutant = mutated(data, 1 << 16, chance.getrandbits(32), lambda raw, limit: raw[:limit])
        check(mutant, tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_used_or_refused(name: str, tmp_path: Path) -> None:
    documents.check((DOCUMENTS / name).read_bytes(), tmp_path)


# A pickle is not here. Without its storages it is refused, although only at its last byte.
@pytest.mark.parametrize("kind", ["plan", "problem", "profile", "statistics"])
def test_a_sound_file_is_accepted(kind: str, tmp_path: Path) -> None:
    assert documents.check(document_seeds()[kind], tmp_path)


@pytest.mark.parametrize("kind", ["plan", "problem", "profile", "statistics", "pickle"])
def test_some_mutants_of_a_file_are_used_or_refused(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    data = (DOCUMENTS / kind).read_bytes()
    for _ in range(60):
        number = chance.getrandbits(32)
        flipped = chance.randrange(1, 256)

        def flip(raw: bytes, limit: int, at: int = number, bits: int = flipped) -> bytes:
            at %= max(1, len(raw))
            return raw[:at] + bytes(byte ^ bits for byte in raw[at : at + 1]) + raw[at + 1 : limit]

        documents.check(documents.mutate(data, 1 << 16, number, flip), tmp_path)

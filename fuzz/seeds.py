"""Write the seeds of the corpus: a sound model in each format that is served.

python -m fuzz.seeds
"""

import json
from pathlib import Path

from fuzz.target import joined
from tests.hostile.formats import CONFIGS, written_tensors
from tests.model_files import shard_bytes

CORPUS = Path(__file__).parent / "corpus"


def seed(name: str) -> bytes:
    """The input that stands for the model in the format `name`."""
    shard = shard_bytes(written_tensors(name))
    length = int.from_bytes(shard[:8], "little")
    return joined(json.dumps(CONFIGS[name]).encode(), shard[8 : 8 + length])


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name in CONFIGS:
        (CORPUS / name).write_bytes(seed(name))

"""How many of HumanEval's even problems a model solves, for `vllm-gac compress --score`.

The odd ones are left to measure what the score was good for.
"""

import sys
import tempfile
from pathlib import Path

from benchmarks.common.engine_process import EngineError
from benchmarks.common.json_lines import zipped_lines_of
from benchmarks.real_models.engine import SAMPLING, SECONDS, Serving, complete, serving
from benchmarks.real_models.human_eval import passed, question
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.families import ARCHITECTURE

_SAMPLES = 5
_SHOWN = 8000  # characters of the log of an engine that failed


def score(model: Path, problems: Path) -> float:
    """The share of sampled answers that solve their problem.

    Args:
        model: A dense model, which is served in bf16, or a compressed one, in FP8 with an FP8
            cache.
        problems: HumanEval.jsonl.gz.
    """
    asked = zipped_lines_of(problems)[::2] * _SAMPLES
    compressed = ARCHITECTURE in open_checkpoint(model).raw_config.get("architectures", ())
    how = Serving(compressed=compressed, precision="fp8" if compressed else "bf16")
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "engine.log"
        try:
            with serving("score", model, how, log, sequences=len(asked)) as engine:
                engine.wait(SECONDS)
                answers = complete(engine, [question(problem) for problem in asked], **SAMPLING)
        except EngineError:
            print(log.read_text()[-_SHOWN:], file=sys.stderr)  # it goes with its directory
            raise
    solved = passed(asked, [text for text, _, _ in answers])
    return sum(solved) / len(solved)

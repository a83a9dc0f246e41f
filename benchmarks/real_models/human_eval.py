"""HumanEval: prompts in chat form, programs run apart, and what two models' results tell.

Chen et al. 2021. A program that a model wrote is run by an interpreter of its own without its
user's modules, in an empty folder, without network and with limits of time and memory.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from scipy.stats import binomtest

_SECONDS = 15
_ASKED = (
    "Complete the following Python function. Answer with the whole function in one ```python "
    "block.\n\n```python\n{}```"
)
# Runs before the program. Without the module, no socket can be made.
_LIMITS = """import resource, sys
for what, most in ((resource.RLIMIT_AS, 4 << 30), (resource.RLIMIT_FSIZE, 1 << 20),
                   (resource.RLIMIT_CPU, 15)):
    resource.setrlimit(what, (most, most))
sys.modules["_socket"] = None
"""


def question(problem: Mapping[str, Any]) -> str:
    """What a model is asked."""
    return _ASKED.format(problem["prompt"])


def passed(problems: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[bool]:
    """Whether the program of each answer passes the tests of its problem."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_passes, problems, answers))


def _passes(problem: Mapping[str, Any], answer: str) -> bool:
    program = "\n".join(
        [_LIMITS, _program(problem, answer), problem["test"], f"check({problem['entry_point']})"]
    )
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-"],
                input=program.encode("utf-8", "replace"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                cwd=empty,
                env={},
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _program(problem: Mapping[str, Any], answer: str) -> str:
    """The code of an answer, after what the prompt imports and defines before its function."""
    blocks = re.findall(r"```(?:python|py)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    code = blocks[0] if blocks else answer
    name = f"def {problem['entry_point']}("
    prompt = problem["prompt"]
    return f"{prompt[: prompt.rindex(name)]}\n{code}" if name in code else prompt + code


def paired(compressed: Sequence[float], dense: Sequence[float]) -> dict[str, Any]:
    """How the shares of solved problems differ, and how sure that is.

    Args:
        compressed: Of each problem, the share of a model's answers that solve it.
        dense: The same of the dense model.

    Returns:
        `points`, the difference in per cent; `interval`, its 95 % interval by a bootstrap of
        problems; `p`, of the exact sign test that there is no difference (McNemar's for one
        answer a problem).
    """
    differences = np.asarray(compressed, dtype=float) - np.asarray(dense, dtype=float)
    drawn = np.random.default_rng(0).integers(len(differences), size=(10_000, len(differences)))
    low, high = np.percentile(differences[drawn].mean(1), [2.5, 97.5])
    better, changed = int((differences > 0).sum()), int((differences != 0).sum())
    return {
        "points": 100 * float(differences.mean()),
        "interval": (100 * float(low), 100 * float(high)),
        "p": float(binomtest(better, changed).pvalue) if changed else 1.0,
    }

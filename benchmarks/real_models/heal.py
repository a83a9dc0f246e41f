"""`vllm-gac heal` that saves no state, which is 21 GB of a 1.5B.

No run goes on with what was begun on a machine that is lent for minutes.
"""

import sys
from typing import Any

from vllm_gac.cli import main
from vllm_gac.healing import train


def _save_nothing(*_: Any) -> None: ...


if __name__ == "__main__":
    vars(train)["write_state"] = _save_nothing
    sys.exit(main())

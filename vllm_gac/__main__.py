"""`python -m vllm_gac` is `vllm-gac`; torchrun starts it in this way."""

import sys

from vllm_gac.cli import main

if __name__ == "__main__":
    sys.exit(main())

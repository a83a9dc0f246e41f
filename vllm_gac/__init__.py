"""vllm-gac: compress LLMs to dimensions GPUs like, and serve them with vLLM.

Importing this package imports neither torch nor vllm, so that the `vllm-gac`
command and vLLM's plugin discovery stay fast.
"""

__version__ = "0.1.0"

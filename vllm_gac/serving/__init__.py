"""The vLLM side of the project: the only package that imports vllm."""

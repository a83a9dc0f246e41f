"""`vllm-gac heal`: training a compressed model."""

"""`vllm-gac calibrate`: text and a dense model become statistics."""

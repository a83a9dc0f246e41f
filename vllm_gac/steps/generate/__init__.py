"""`vllm-gac generate`: the dense model writes text to be calibrated and healed on."""

"""`vllm-gac compress`: a plan and statistics become a smaller model."""

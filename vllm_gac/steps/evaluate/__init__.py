"""`vllm-gac evaluate`: perplexity, by the reference or by vLLM."""

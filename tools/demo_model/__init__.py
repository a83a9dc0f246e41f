"""Makes the demo model in vllm_gac/demo: corpus, tokenizer, training and model card."""

"""How the demo model in vllm_gac/demo was made: corpus, tokenizer, training and model card."""

"""What the demo model and those of the ladder are made of: corpus, Llama, tokenizer, training."""

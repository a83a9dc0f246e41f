"""`vllm-gac repair`: dims padded to aligned ones."""

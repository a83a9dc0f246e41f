"""What a model is: its dims, config.json, RoPE and tensor-parallel split; no reading of weights."""

"""`compress --max-loss`: models are written and measured until one is near the loss."""

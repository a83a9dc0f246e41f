"""Quality of plans for the demo model: the perplexity of its held-out text."""

"""Quality of plans on the demo model: perplexity of its held-out text, measured."""

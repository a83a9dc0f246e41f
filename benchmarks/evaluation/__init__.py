"""Perplexity and lm-eval scores of served models: see __main__.py."""

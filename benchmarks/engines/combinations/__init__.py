"""Compression together with other features of vLLM, on a GPU: see __main__.py."""

"""Many requests that share a long prefix, on one GPU: see __main__.py."""

"""Compression with what users combine it with, on a GPU: see __main__.py."""

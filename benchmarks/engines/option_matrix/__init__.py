"""Pairs of engine options, each engine checked against the fp32 reference: see __main__.py."""

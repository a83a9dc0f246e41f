"""A ladder of trained models, and what compression costs each of them (see __main__.py)."""

"""Engine options by pairs, each engine against the fp32 reference: see __main__.py."""

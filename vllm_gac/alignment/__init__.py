"""Dimension repair: misaligned dims are made ones that kernels like, by padding with zeros.

After "dimension repair" of the GAC paper (section 5), with each role's two sides padded together,
so that outputs need no slicing: what a padded row computes meets a padded column of zeros.
"""

"""A/B comparisons: start several servers in turn, send each the same traffic, and stop them."""

"""Checks of the load test itself: servers of known truth, and what the report says of them."""

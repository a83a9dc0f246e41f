"""What happens to vLLM's config in the front-end process: reading, checks, padding, defaults.

These modules may import `serving.loading` and what lies below it, but not `serving.attention` or
`serving.model`.
"""

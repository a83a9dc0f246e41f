"""The vLLM model class of gac models: its layers and linear layers.

These modules may import `serving.attention`, `serving.config`, `serving.loading` and what lies
below them.
"""

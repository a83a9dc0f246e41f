"""The vLLM model class of gac models: its layers, linear layers and LoRA adapters.

These modules may import `serving.attention`, `serving.config`, `serving.loading` and what lies
below them.
"""

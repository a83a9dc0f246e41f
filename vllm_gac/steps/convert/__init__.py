"""`vllm-gac import` and `export`: models of other tools and for other engines."""

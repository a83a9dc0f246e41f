"""The architecture name of gac models in config.json, and the name of their load format in vLLM.

The plugin reads both whenever vLLM starts, whatever model it serves, so this file imports nothing.
"""

ARCHITECTURE = "GacLlamaForCausalLM"
LOAD_FORMAT = "gac"

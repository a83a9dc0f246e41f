"""Names of gac models in config.json, and of their load format in vLLM.

The plugin reads them whenever vLLM starts, whatever model it serves, so this file imports nothing.
"""

ARCHITECTURE = "GacLlamaForCausalLM"
LOAD_FORMAT = "gac"

"""What a gac model calls itself in config.json, and how vLLM is told to load one.

The plugin reads them when vLLM starts, whatever it serves: nothing is imported here.
"""

ARCHITECTURE = "GacLlamaForCausalLM"
LOAD_FORMAT = "gac"

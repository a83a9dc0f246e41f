"""Names: of this release, of gac models in config.json, and of their load format in vLLM.

The plugin reads them whenever vLLM starts, whatever model it serves, so this file imports nothing.
"""

VERSION = "0.1.0"
ARCHITECTURE = "GacLlamaForCausalLM"
LOAD_FORMAT = "gac"

"""The files beside a model's config and weights that belong to the model, by patterns of names."""

# Any of these may be what a model's tokenizer is made of.
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
)
# Defaults of generation, the chat template, and what a licence wants to be passed on.
OTHERS = (
    "generation_config.json",
    "chat_template*",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
COMPANIONS = (*TOKENIZER, *OTHERS)

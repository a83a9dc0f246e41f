"""Which gate and up projections our kernel computes: those for which it was faster on an H200.

Apart from the kernel, because predicting times needs neither torch nor Triton.
"""

# Within these limits it takes less time than cuBLAS and vLLM's SwiGLU (docs/decisions.md).
# The true limit is between 2880 and 5760 features.
MAX_TOKENS = 32
_MIN_FEATURES = 4096


def is_within_limits(tokens: int, features: int, width: int) -> bool:
    """Whether gate and up [features, width] of so many tokens are computed by our kernel."""
    return 0 < tokens <= MAX_TOKENS and features >= _MIN_FEATURES and width % 8 == 0

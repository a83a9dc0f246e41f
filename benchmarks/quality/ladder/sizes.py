"""The models of the ladder: Llamas with heads of 128, a context of 2048, the demo's tokenizer."""

from dataclasses import dataclass, replace

from tools.demo_model.llama import Architecture

ROPE_THETAS = (10000.0, 500000.0)


@dataclass(frozen=True, slots=True)
class Size:
    """A rung: its dims, the peak learning rate and the windows of a step.

    Larger models take smaller rates; the rates are usual ones, not searched for.
    """

    architecture: Architecture
    lr: float
    batch: int


SIZES = {
    # Not a rung: small enough to try every command of the ladder on a CPU in seconds.
    "tiny": Size(
        Architecture(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
        ),
        lr=3e-3,
        batch=4,
    ),
    # 30.4 M parameters
    "30m": Size(
        Architecture(hidden_size=512, intermediate_size=1280, num_hidden_layers=8),
        lr=2e-3,
        batch=16,
    ),
    # 131.6 M
    "130m": Size(
        Architecture(hidden_size=1024, intermediate_size=2432, num_hidden_layers=12),
        lr=1e-3,
        batch=16,
    ),
    # 355.9 M. vLLM cannot serve it: transformers refuses 12 heads for a hidden size of 1,280.
    "350m": Size(
        Architecture(
            hidden_size=1280,
            intermediate_size=3200,
            num_hidden_layers=20,
            num_attention_heads=12,
        ),
        lr=6e-4,
        batch=16,
    ),
}


def architecture(name: str, rope_theta: float) -> Architecture:
    """The dims of the rung `name` with RoPE's base `rope_theta`."""
    return replace(SIZES[name].architecture, rope_theta=rope_theta)

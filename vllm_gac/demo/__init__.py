"""A small Llama that writes Python, and its texts: the shipped files, by path."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
# Whole modules of the training split, and the whole held-out split.
CALIBRATION = Path(__file__).parent / "calibration.txt"
HELD_OUT = Path(__file__).parent / "heldout.txt"
# What `compress` plans for 85 % of its parameters and 75 % of its KV cache (`make demo-plan`).
PLAN = Path(__file__).parent / "plan.json"

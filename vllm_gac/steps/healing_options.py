"""Which numbers a healing can be asked for."""

from collections.abc import Mapping

from vllm_gac.errors import HealingError

# (lowest, highest) of each option. The divergence at a temperature T is taken times T^2: far beyond
# these limits that overflows, or no gradient is left.
_LIMITS: Mapping[str, tuple[float, float]] = {
    "--tokens": (1, 1e15),
    "--batch-tokens": (1, 1e15),
    "--lora-rank": (1, 1e6),
    "--learning-rate": (1e-12, 1e6),
    "--temperature": (0.01, 100),
    "--hidden-weight": (0, 1e6),
}
_COUNTS = ("--tokens", "--batch-tokens", "--lora-rank")


def refuse_impossible(options: Mapping[str, float | None]) -> None:
    """Raise HealingError naming the first of the options, by their flags, beyond its limits.

    None stands for an option that is left out. The command line refuses some of these by itself;
    from Python anything may come.
    """
    for flag, value in options.items():
        if value is not None and not isinstance(value, int if flag in _COUNTS else (int, float)):
            number = "whole number" if flag in _COUNTS else "number"
            raise HealingError(f"{flag} {value!r}: expected a {number}")
        lowest, highest = _LIMITS[flag]
        if value is not None and not lowest <= value <= highest:  # also if NaN
            raise HealingError(f"{flag} {value:g}: must be from {lowest:g} to {highest:g}")

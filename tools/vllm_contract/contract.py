"""All of the contract, checked against one release."""

from pathlib import Path

from tools.vllm_contract.behaviours import BEHAVIOURS, OVERRIDDEN, changed_behaviours
from tools.vllm_contract.sources import Release
from tools.vllm_contract.uses import Uses

ROOT = Path(__file__).parents[2]


def broken(release: Release) -> tuple[list[str], str]:
    """What vllm-gac relies on that `release` does not have, and how much was checked.

    Returns:
        A sentence for each fault; and the numbers of names, attributes and calls and of behaviours
        that were compared, as text.
    """
    faults: list[str] = []
    names: set[str] = set()
    members = calls = 0
    for file in sorted((ROOT / "vllm_gac").rglob("*.py")):
        path = file.relative_to(ROOT)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        uses = Uses(release, module, file, str(path))
        faults += uses.broken()
        names |= uses.names
        members += uses.members
        calls += uses.calls
    faults += changed_behaviours(release)
    behaviours = len(BEHAVIOURS) + sum(len(x.split()) for x in OVERRIDDEN.values())
    checked = (
        f"{len(names)} names, {members} attributes, {calls} calls and overrides, "
        f"{behaviours} behaviours"
    )
    return faults, checked

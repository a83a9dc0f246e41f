"""Hardware counters by Nsight Compute: the metrics, and a parser of its output."""

import csv
import itertools
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.paper.timing import short_name

# Metrics by their name in the results. A metric that a version or a GPU lacks is left out.
METRICS = {
    "ns": "gpu__time_duration.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "wgmma": "smsp__inst_executed_pipe_tensor_op_gmma.sum",
    "mma": "smsp__inst_executed_pipe_tensor_op_hmma.sum",
    "tma": "sm__inst_executed_pipe_tma.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "l2_sectors_written": "lts__t_sectors_op_write.sum",
    "l1_load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1_load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
}
# Instructions that move operands or multiply matrices.
_TOLD = re.compile(r"^(LDG|LDGSTS|LDS|LDSM|UTMA|UBLKCP|STG|[A-Z]*MMA)")


class RefusedError(Exception):
    """Nsight Compute is not installed or may not read counters; the message is its own."""


@dataclass(slots=True)
class Kernel:
    """One kernel: counters by the names of METRICS, and executed instructions by opcode."""

    name: str
    counters: dict[str, float]
    opcodes: dict[str, int] = field(default_factory=dict)


def profile(module: str, marker: str, work: Path) -> list[list[Kernel]]:
    """Profile the kernels that `python -m module` runs between profiler.start and stop.

    Args:
        module: The module to run.
        marker: Name of the kernel that runs before each case.
        work: Directory for the report, which ncu-ui can open.

    Returns:
        The kernels of each case.

    Raises:
        RefusedError: Nsight Compute is not installed, or fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RefusedError("ncu (Nsight Compute) is not on the PATH")
    known = set(re.findall(r"^(\w+__\w+)", _run(ncu, "--query-metrics"), re.MULTILINE))
    wanted = [metric for metric in METRICS.values() if metric.split(".")[0] in known]
    report = work / "counters.ncu-rep"
    _run(
        ncu, "--force-overwrite", "--export", str(report), "--profile-from-start", "off",
        "--clock-control", "none", "--section", "SourceCounters", "--metrics", ",".join(wanted),
        sys.executable, "-m", module,
    )  # fmt: skip
    pages = {}
    for page, extra in (("raw", []), ("source", ["--print-source", "sass"])):
        arguments = ["--page", page, *extra, "--csv", "--print-units", "base"]
        pages[page] = _run(ncu, "--import", str(report), *arguments)
        (work / f"{page}.csv").write_text(pages[page])
    return by_marker(kernels_of(pages["raw"], pages["source"]), marker)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
    if done.returncode or errors:
        raise RefusedError("; ".join(errors) or done.stderr.strip()[-500:] or "ncu failed")
    return done.stdout


def kernels_of(raw: str, source: str) -> list[Kernel]:
    """All kernels in order, from ncu's raw and source pages in CSV."""
    header, _units, *rows = _csv(raw)
    name = header.index("Kernel Name")
    found = [Kernel(short_name(row[name]), _counters(header, row)) for row in rows]
    listings = list(_opcodes(source))
    if len(listings) == len(found):
        for kernel, opcodes in zip(found, listings, strict=True):
            kernel.opcodes = dict(opcodes)
    return found


def by_marker(kernels: Sequence[Kernel], marker: str) -> list[list[Kernel]]:
    """The kernels after each kernel whose name contains `marker`."""
    cases: list[list[Kernel]] = []
    for kernel in kernels:
        if marker in kernel.name:
            cases.append([])
        elif cases:
            cases[-1].append(kernel)
    return cases


def _csv(text: str) -> list[list[str]]:
    """Rows of a page, without ncu's messages."""
    return [row for row in csv.reader(text.splitlines()) if row and not row[0].startswith("==")]


def _counters(header: Sequence[str], row: Sequence[str]) -> dict[str, float]:
    cells = dict(zip(header, row, strict=False))
    numbers = {name: cells.get(metric, "").replace(",", "") for name, metric in METRICS.items()}
    return {name: float(number) for name, number in numbers.items() if number not in ("", "n/a")}


def _opcodes(source: str) -> Iterator[Counter[str]]:
    """Executed instructions by opcode, for each kernel."""
    for header, *rows in _listings(source):
        code, executed = header.index("Source"), header.index("Instructions Executed")
        counts: Counter[str] = Counter()
        for row in rows:
            opcode = opcode_of(row[code])
            if _TOLD.match(opcode):
                counts[opcode] += int(row[executed].replace(",", ""))
        yield +counts


def _listings(source: str) -> Iterator[list[list[str]]]:
    """Header and rows of each kernel's SASS.

    ncu 2025.3 prints the listing of a template twice. Two launches of one kernel differ in samples.
    """
    listings: list[list[list[str]]] = []
    for row in _csv(source):
        if row[0] == "Kernel Name":
            listings.append([])
        else:
            listings[-1].append(row)
    for before, listing in itertools.pairwise([[], *listings]):
        if listing != before:
            yield listing


def opcode_of(instruction: str) -> str:
    """ "@!P0 LDG.E.128 R4, [R2]" -> "LDG.E.128"."""
    words = [word for word in instruction.split() if not word.startswith("@")]
    return words[0].rstrip(";") if words else ""


def load_bytes(opcode: str) -> int | None:
    """Bytes that one thread loads from global memory; None if `opcode` is another instruction.

    A TMA load counts as 0, since one instruction loads a whole tile.
    """
    kind, *modifiers = opcode.split(".")
    if kind.startswith(("UTMALDG", "UBLKCP")):
        return 0
    if kind not in ("LDG", "LDGSTS"):
        return None
    for modifier in modifiers:
        if modifier in ("128", "64"):
            return int(modifier) // 8
        if modifier in ("U8", "S8", "U16", "S16"):
            return int(modifier[1:]) // 8
    return 4

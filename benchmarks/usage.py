"""CPU and memory of processes, and the idle share of the machine, as Linux counts them."""

import os
from pathlib import Path

TIMES = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_IDLE = slice(3, 5)
"""Idle, and idle while a disk is busy."""
_COUNTED = slice(0, 8)
"""Later numbers are of guests, which are counted as user time, too."""


def process_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has spent, and children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def family_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children, those that ended included."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    return process_seconds(pid) + sum(process_seconds(int(child)) for child in children)


def resident(pid: int) -> int:
    """Return the bytes that a process has in memory, 0 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def peak_resident(pid: int) -> int:
    """Return the most bytes that a process ever had in memory, 0 if there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(one.split()[1]) * 1024 for one in lines if one.startswith("VmHWM:")), 0)


def machine_seconds() -> tuple[float, float]:
    """Return the seconds that all cores were idle, and all their seconds; zeros off Linux."""
    try:
        first = TIMES.read_text().partition("\n")[0].split()[1:]
    except OSError:
        return 0.0, 0.0
    counted = [int(one) / _TICKS for one in first[_COUNTED]]
    return sum(counted[_IDLE]), sum(counted)

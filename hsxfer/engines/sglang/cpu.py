"""Processor time of a server's ranks, seen from outside: the same for stock sglang and for hsxfer.

Start the server with `sleep_on_idle=True`, or idle schedulers count as busy. The time that hidden states take is the difference between
the same prompts with and without them; what hsxfer itself spends is also in its counters, exactly, as `cpu_s`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_TITLE = re.compile(r"sglang::scheduler(?:_DP(\d+))?(?:_PP(\d+))?(?:_TP(\d+))?")


def scheduler_cpu_s(launcher: int) -> dict[str, float]:
    """Seconds of processor time, user and system, of each scheduler under the process `launcher`: `{"dp0-pp0-tp1": 12.5}`."""
    parents: dict[int, int] = {}
    schedulers: dict[int, tuple[str, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            title = _TITLE.match((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:  # it ended meanwhile
            continue
        pid = int(entry.name)
        parents[pid] = int(stat[1])
        if title:
            dp, pp, tp = (number or 0 for number in title.groups())
            schedulers[pid] = (f"dp{dp}-pp{pp}-tp{tp}", (int(stat[11]) + int(stat[12])) / _TICKS)
    return {label: spent for pid, (label, spent) in schedulers.items() if _descends(pid, launcher, parents)}


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor

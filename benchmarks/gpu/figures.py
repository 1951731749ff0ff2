"""A table of figures: each with what it is held against and what it must reach, and published whether it does or not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hsxfer

ROWS, WIDTH = 32_768, 12_288  # 805 MB of bfloat16


class Figures:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self, name: str, value: float, unit: str, against: str, op: str = "", target: float | None = None, **more: Any
    ) -> None:
        row = {"name": name, "value": value, "unit": unit, "against": against, "op": op, "target": target, **more}
        if target is not None:
            row["met"] = value >= target if op == ">=" else value <= target
        self.rows.append({key: _rounded(item) for key, item in row.items()})
        verdict = "" if target is None else f"{op} {target:g}: {'met' if row['met'] else 'MISSED'}"
        print(f"{name:58s} {value:10.4g} {unit:6s} {verdict}", flush=True)


def _rounded(item: Any) -> Any:
    return float(f"{item:.4g}") if isinstance(item, float) else item


def seconds(function: Callable[[], Any]) -> float:
    """Of the host's clock, from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def gpu_seconds(function: Callable[[], Any], rounds: int = 20) -> float:
    """Median of the GPU's own clock. It is kept busy until everything is queued, so that the host's part does not count."""
    times = []
    for _ in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def random_rows(rows: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, 2 * width), dtype=torch.uint8, device="cuda").view(torch.bfloat16)


class PinnedCopy:
    """The baseline: one copy of the same bytes into memory that torch pinned."""

    def __init__(self, num_bytes: int) -> None:
        self._source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
        self._target = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()

    def seconds(self, num_bytes: int | None = None) -> float:
        n = num_bytes or len(self._source)
        return seconds(lambda: self._target[:n].copy_(self._source[:n], non_blocking=True))


def take(source: hsxfer.Source, handle: Any) -> None:
    source.get(handle, verify=False).release()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))

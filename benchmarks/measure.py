"""One row: the subject and its baseline in turn, so that a machine whose speed drifts does not move their ratio."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .rows import ROWS, SCALE

QUICK_ROUNDS = 2


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; of fewer than 1 / (1 - share) values the largest."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Measure:
    """pytest-benchmark times the subject; `before` and the baseline run, untimed by it, ahead of every round."""

    def __init__(self, benchmark: Any, results: list[dict[str, Any]], quick: bool) -> None:
        self._benchmark = benchmark
        self._results = results
        self.quick = quick

    def __call__(
        self,
        name: str,
        subject: Callable[[], Any],
        *,
        baseline: Callable[[], Any] | None = None,
        before: Callable[[], Any] | None = None,
        after: Callable[[], Any] | None = None,
        rounds: int = 30,
        warmup: int = 3,
        num_bytes: int = 0,
        per: int = 1,
        own_clock: bool = False,
        cpu: bool = False,
    ) -> None:
        """`per`: how many requests a round is. `own_clock`: subject and baseline return their seconds, measured where it matters.
        `cpu`: also what the calling thread itself spent, which is what is left of a call where a core waits for it."""
        theirs: list[float] = []
        ours: list[float] = []
        spent: list[float] = []

        def setup() -> None:
            if baseline is not None:
                theirs.append(baseline() if own_clock else seconds(baseline))
            if before is not None:
                before()

        def with_own_clock() -> None:
            ours.append(subject())

        def with_cpu() -> None:
            start = time.thread_time()
            subject()
            spent.append(time.thread_time() - start)

        rounds, warmup = (QUICK_ROUNDS, 1) if self.quick else (rounds, warmup)
        target = with_own_clock if own_clock else with_cpu if cpu else subject
        self._benchmark.pedantic(target, setup=setup, teardown=after, rounds=rounds, warmup_rounds=warmup)
        times = ours[warmup:] if own_clock else list(self._benchmark.stats.stats.data)
        result = summary(name, times, theirs[warmup:], spent[warmup:], num_bytes, per)
        self._benchmark.extra_info.update(result)
        self._results.append(result)


def summary(
    name: str, ours: list[float], theirs: list[float], spent: list[float], num_bytes: int, per: int
) -> dict[str, Any]:
    """What goes into the JSON: times in the row's unit and per request, GB/s of 10^9 bytes, targets with their verdicts."""
    row = ROWS[name]
    scale = SCALE[row.unit] / per
    result: dict[str, Any] = {"name": name, "unit": row.unit, "rounds": len(ours)}
    result["median"] = scale * statistics.median(ours)
    result["p99"] = scale * percentile(ours, 0.99)
    result["best"] = scale * min(ours)
    if spent:
        result["cpu_median"] = scale * statistics.median(spent)
    if num_bytes:
        result["gb_per_s"] = num_bytes / statistics.median(ours) / 1e9
    if theirs:
        ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
        result |= {"baseline": row.baseline, "baseline_median": scale * statistics.median(theirs)}
        result["ratio"] = statistics.median(ratios)
        result["ratio_quartiles"] = [percentile(ratios, 0.25), percentile(ratios, 0.75)]
    result["targets"] = [
        {**target._asdict(), "value": result[target.figure], "met": target.met(result[target.figure])}
        for target in row.targets
    ]
    return {key: _rounded(value) for key, value in result.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value

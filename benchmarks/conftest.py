"""Options, the report at the end, the JSON. `--quick` shrinks everything to a check that the benchmarks still work."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from . import machine
from .draw import markdown
from .measure import Measure

_results = pytest.StashKey[list[dict[str, Any]]]()
_started = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hsxfer")
    group.addoption(
        "--quick", action="store_true", help="tiny sizes, two rounds: checks the benchmarks, measures nothing"
    )
    group.addoption("--results", type=Path, help="write the JSON here", default=Path(".benchmarks/latest.json"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_results] = []
    config.stash[_started] = {"load_before": os.getloadavg(), "time": time.time()}


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--quick"))


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest, quick: bool) -> Measure:
    return Measure(benchmark, request.config.stash[_results], quick)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_results]
    if not rows:
        return
    started = config.stash[_started]
    report = {
        "machine": machine.describe(),
        "load_average": {"before": round(started["load_before"][0], 2), "after": round(os.getloadavg()[0], 2)},
        "seconds": round(time.time() - started["time"]),
        "commit": machine.commit(),
        "versions": machine.versions(),
        "arguments": {"quick": config.getoption("--quick"), "k": config.getoption("keyword")},
        "rows": rows,
    }
    path: Path = config.getoption("--results")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    terminalreporter.section("hsxfer")
    terminalreporter.write_line(markdown(report, every=True))
    targets = [target for row in rows for target in row["targets"]]
    terminalreporter.write_line(f"{sum(target['met'] for target in targets)} of {len(targets)} targets met")

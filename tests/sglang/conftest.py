"""Real sglang on the CPU. Tests of one server stand in one file, so that each server starts once."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference import STOCK_TP1, STOCK_TP2, STORE, Reference, Stock
from servers import Servers

import hsxfer

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*tp*.py", "test_*start*.py"]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp("servers"))
    yield running
    running.stop()
    # Killed servers leave their arenas, and no later one of this store reclaims them.
    for left in Path("/dev/shm").glob(f"hsxfer-{os.getuid()}-{STORE.removeprefix('shm://')}*"):
        shutil.rmtree(left)


@pytest.fixture(scope="session")
def source() -> Iterator[Any]:
    with hsxfer.open_source(STORE) as opened:
        yield opened


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def stock_tp1(servers: Servers) -> Stock:
    return Stock(servers, STOCK_TP1)


@pytest.fixture(scope="session")
def stock_tp2(servers: Servers) -> Stock:
    return Stock(servers, STOCK_TP2)

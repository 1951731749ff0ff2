"""What is in this machine's stores, seen from outside: nothing is attached to or changed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsxfer.arena import probe
from hsxfer.config import Options, StoreUrl, parse_url
from hsxfer.errors import ConfigError, TransportUnavailable
from hsxfer.transports import TRANSPORTS
from hsxfer.transports.shm import arena_paths, check_private, store_dir

SHM_DIR = "/dev/shm"


@dataclass(frozen=True)
class ArenaReport:
    """`state`: alive, closed (in order, with samples unread) or dead. `age_s` since it was created."""

    instance: str
    rank: str
    state: str
    capacity_bytes: int
    used_bytes: int
    file_bytes: int
    num_ready: int
    num_open: int
    num_failed: int
    num_unread: int
    readers: bool
    age_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_store(name_or_url: str) -> StoreUrl:
    """`NAME` or `shm://NAME`. Raises `ConfigError`, also for a store that has no files to look at."""
    url = name_or_url if "://" in name_or_url else f"shm://{name_or_url}"
    return parse_url(url, tuple(TRANSPORTS))


def arenas(store: StoreUrl) -> list[ArenaReport]:
    """Raises `TransportUnavailable` for a directory that is not the user's own; a store that is not there has no arenas."""
    directory = store_dir(store)
    if not os.path.lexists(directory):
        return []
    check_private(directory)
    reports = []
    for path in arena_paths(directory):
        with contextlib.suppress(ConfigError, TransportUnavailable):  # not an arena, or gone meanwhile
            reports.append(_report(path, probe(path)))
    return reports


def _report(path: str, info: dict[str, int]) -> ArenaReport:
    instance, _, rank = os.path.basename(path).partition(".")
    return ArenaReport(
        instance=instance,
        rank=rank,
        state="closed" if info["closed"] else "alive" if info["alive"] else "dead",
        capacity_bytes=info["capacity_bytes"],
        used_bytes=info["payload_bytes"],
        file_bytes=info["file_bytes"],
        num_ready=info["num_ready"],
        num_open=info["num_open"],
        num_failed=info["num_failed"],
        num_unread=info["num_unread"],
        readers=bool(info["readers_attached"]),
        age_s=max(0.0, time.time() - info["created_us"] / 1e6),
    )


def stores_of_user(shm_dir: str = SHM_DIR) -> Iterator[StoreUrl]:
    """The shm stores that this user has in `shm_dir`."""
    prefix = f"hsxfer-{os.geteuid()}-"
    for path in sorted(Path(shm_dir).glob(f"{prefix}*")):
        yield StoreUrl("shm", path.name.removeprefix(prefix), Options(dir=shm_dir))


def size(num_bytes: float) -> str:
    """`1536` -> `"1.5 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

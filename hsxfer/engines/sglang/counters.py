"""What a rank did for hidden states, for whoever wants to check that the others did nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

WRITE_EVERY_S = 0.25


@dataclass
class Counters:
    """Counts since the server started. `cpu_s`: seconds of this thread's processor time inside hsxfer's hooks."""

    num_requests: int = 0
    num_held: int = 0
    num_rejected: int = 0
    num_committed: int = 0
    num_failed: int = 0
    num_forwards: int = 0
    num_writes: int = 0
    num_rows: int = 0
    num_bytes: int = 0
    cpu_s: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the processor time of the block to `cpu_s`."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - start


class StatsFile:
    """`stats()` as JSON at `path`, replaced in one piece when it changed, at most every `WRITE_EVERY_S`."""

    def __init__(self, path: str, stats: Callable[[], dict[str, Any]]) -> None:
        self.path = path
        self._stats = stats
        self._due = 0.0
        self._last = ""

    def poll(self) -> None:
        """Cheap unless due; the scheduler calls it once a loop."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + WRITE_EVERY_S
        text = json.dumps(self._stats(), sort_keys=True)
        if text == self._last:
            return
        self._last = text
        draft = f"{self.path}.{os.getpid()}"
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, self.path)


def as_dict(counters: Counters) -> dict[str, Any]:
    return asdict(counters)

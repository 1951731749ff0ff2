"""Samples fetched ahead of the loop that wants them."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from .errors import HsxferError
from .sample import Sample

Name = TypeVar("Name")

_POLL_S = 0.1  # how long a thread that waits overlooks that nobody wants its result any more

Fetched = tuple[Name, "Future[Sample]"]


class Prefetcher(Generic[Name]):
    """Iterates over `(name, future of its sample)` in the order of `names`, up to `depth` of them under way.

    `names` is read in a thread of its own, so it may wait, for a server's replies say. With `num_threads` 2 one sample is found and
    its copies queued while another's run. A future raises what `get` did; an exception of `names` ends the iteration with it.
    """

    def __init__(self, get: Callable[[Name], Sample], names: Iterable[Name], depth: int, num_threads: int = 1) -> None:
        self._get = get
        self._names = iter(names)
        self._num_threads = num_threads
        self._ahead: queue.Queue[Fetched[Name] | None] = queue.Queue(depth)
        self._turn = threading.Lock()  # names are taken and listed in one step
        self._unwanted = threading.Event()
        self._ended = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Fetched[Name]]:
        for _ in range(self._num_threads):
            # Daemons: one may be waiting for a name that never comes, and a process that gave up must be able to end.
            threading.Thread(target=self._run, name="hsxfer-prefetch", daemon=True).start()
        box: list[Fetched[Name] | None] = []  # so that no name here holds what was handed out
        try:
            while True:
                box.append(self._ahead.get())
                if box[0] is None:
                    break
                yield box.pop()  # type: ignore[misc]
            if self._error is not None:
                raise self._error
        finally:
            self._unwanted.set()
            while not self._ahead.empty():
                if (left := self._ahead.get()) is not None:
                    left[1].add_done_callback(_release)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            name, future = taken
            del taken
            try:
                future.set_result(self._get(name))
            except HsxferError as error:
                future.set_exception(error)
            finally:
                if not future.done():
                    future.set_exception(sys.exc_info()[1])
            del future

    def _take(self) -> Fetched[Name] | None:
        with self._turn:
            taken: Fetched[Name] | None = None
            try:
                if not self._ended:
                    for name in self._names:
                        taken = (name, Future())
                        break
            finally:
                if taken is None and not self._ended:
                    self._ended, self._error = True, sys.exc_info()[1]
                    self._offer(None)
            return taken if taken is not None and self._offer(taken) else None

    def _offer(self, item: Fetched[Name] | None) -> bool:
        """Whether anybody still wants it."""
        while not self._unwanted.is_set():
            try:
                self._ahead.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False


def _release(future: Future[Sample]) -> None:
    if future.exception() is None:
        future.result().release()

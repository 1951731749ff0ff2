"""What a sink has under way: copies queued in the arena from whichever device, and the tensors they still read from."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import _native
from .arena import WAIT_SLICE_S, Arena
from .errors import ConfigError, TransferTimeout, TransportUnavailable
from .foreign import HOST
from .tensors import cuda_device_in_use
from .ticket import Plan

log = logging.getLogger("hsxfer")

_COPY = struct.Struct("=9QII3Q")
assert _COPY.size == ctypes.sizeof(_native.Copy)

_BATCH = 64  # writes from a GPU in a submission: a copy of 400 KB takes longer than preparing the next one does


class Outbox:
    """Submits batches in order and owns their sources until they are done. Calls are the caller's to serialise, but for `flush`."""

    def __init__(self, arena: Arena, store: str, device: str) -> None:
        self.arena = arena
        self._store = store
        self._device = device  # the URL's option
        self._attached = {HOST}
        self._buffer = ctypes.create_string_buffer(64 * _COPY.size)
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._last = 0
        self._stopping = False
        # A thread, so that a tensor is let go of also when no further call ever comes.
        self._reaper = threading.Thread(target=self._reap, name="hsxfer-reaper", daemon=True)
        self._reaper.start()

    def prepare(self) -> None:
        """Pins the arena for the URL's `device`, or for the one that torch uses here; otherwise the first tensor from a GPU does."""
        if self._device.startswith("cuda:"):
            self.attach({int(self._device.removeprefix("cuda:"))})
        elif self._device == "auto" and (current := cuda_device_in_use()) is not None:
            try:
                self.attach({current})
            except TransportUnavailable as error:
                log.info("%s takes tensors from host memory only: %s", self._store, error)

    def attach(self, devices: set[int]) -> None:
        """Copies may come from these devices from now on. Raises `TransportUnavailable`, or `ConfigError` where the URL says cpu."""
        for device in devices - self._attached:
            if self._device == "cpu":
                raise ConfigError(f"{self._store} was opened with device=cpu: it takes no tensors from cuda:{device}")
            warning = self.arena.attach(device)
            self._attached.add(device)
            if warning:
                log.warning(
                    "%s: the arena's %d bytes could not be pinned, copies from cuda:%d run at a fifth of the speed (%s). "
                    "Raise the limit on locked memory (ulimit -l), or choose a smaller capacity",
                    *(self._store, self.arena.capacity_bytes, device, warning),
                )

    def submit(self, copies: Iterable[tuple[Plan, int, int]], owners: list[Any]) -> None:
        """`(plan, device, stream)` each. One native call and one event a device and stream (for `_BATCH` copies from a GPU, so
        that the first run while the last are prepared); `owners` live until all are done."""
        batches: dict[tuple[int, int], list[Plan]] = {}
        for plan, device, stream in copies:
            plans = batches.setdefault((device, stream), [])
            plans.append(plan)
            if len(plans) == _BATCH and device != HOST:
                self._submit(batches.pop((device, stream)), owners, device, stream)
        for (device, stream), plans in batches.items():
            self._submit(plans, owners, device, stream)

    def _submit(self, plans: list[Plan], owners: list[Any], device: int, stream: int) -> None:
        if len(plans) * _COPY.size > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(2 * len(plans) * _COPY.size)
        for number, plan in enumerate(plans):
            _COPY.pack_into(self._buffer, number * _COPY.size, *plan)
        self._last = self.arena.submit_copies(self._buffer, len(plans), device, stream)
        self._in_flight.append((self._last, owners))

    def seal(self, slot: _native.Slot, tail: bytes, failed: bool) -> None:
        self._last = self.arena.submit_seal(slot, tail, failed)

    def flush(self, timeout_s: float) -> None:
        """Returns when everything submitted before this call is done. Raises `TransferTimeout`."""
        target, deadline = self._last, time.monotonic() + timeout_s
        while target:
            left = deadline - time.monotonic()
            try:
                self.arena.wait_done(target - 1, max(0.0, min(left, WAIT_SLICE_S)))
                return
            except TransferTimeout:
                if left <= 0:
                    raise TransferTimeout(f"submission {target} is not done after {timeout_s:g} s") from None

    def close(self) -> None:
        self._stopping = True
        self._reaper.join()
        self.arena.close()  # waits for what is queued
        self._in_flight.clear()

    def _reap(self) -> None:
        done = 0
        while not self._stopping:
            with contextlib.suppress(TransferTimeout):
                done = self.arena.wait_done(done, WAIT_SLICE_S)
            # Also after a timeout: `submit` may have been slower to list its owners than the copies to be done.
            while self._in_flight and self._in_flight[0][0] <= done:
                self._in_flight.popleft()


@contextlib.contextmanager
def unless_done(undo: Callable[[object], object]) -> Iterator[None]:
    """Calls `undo` with the exception that ends the block, if one does: also with Ctrl-C, so that no sample stays half written."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            undo(sys.exc_info()[1])

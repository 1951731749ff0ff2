"""What a sink has under way: copies queued in the arena, and the tensors they still read from."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from . import _native
from .arena import WAIT_SLICE_S, Arena
from .errors import TransferTimeout
from .ticket import Plan

_COPY = struct.Struct("=9QII3Q")
assert _COPY.size == ctypes.sizeof(_native.Copy)


class Outbox:
    """Submits batches in order and owns their sources until they are done. Calls are the caller's to serialise, but for `flush`."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._buffer = ctypes.create_string_buffer(64 * _COPY.size)
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._last = 0
        self._stopping = False
        # A thread, so that a tensor is let go of also when no further call ever comes.
        self._reaper = threading.Thread(target=self._reap, name="hsxfer-reaper", daemon=True)
        self._reaper.start()

    def submit(self, plans: Sequence[Plan], owners: Any, device: int, stream: int) -> None:
        """One native call and one event for all of `plans`; `owners` lives until the copies are done."""
        if len(plans) * _COPY.size > len(self._buffer):
            self._buffer = ctypes.create_string_buffer(2 * len(plans) * _COPY.size)
        for number, plan in enumerate(plans):
            _COPY.pack_into(self._buffer, number * _COPY.size, *plan)
        self._last = self._arena.submit_copies(self._buffer, len(plans), device, stream)
        self._in_flight.append((self._last, owners))

    def seal(self, slot: _native.Slot, tail: bytes, failed: bool) -> None:
        self._last = self._arena.submit_seal(slot, tail, failed)

    def flush(self, timeout_s: float) -> None:
        """Returns when everything submitted before this call is done. Raises `TransferTimeout`."""
        target, deadline = self._last, time.monotonic() + timeout_s
        while target:
            left = deadline - time.monotonic()
            try:
                self._arena.wait_done(target - 1, max(0.0, min(left, WAIT_SLICE_S)))
                return
            except TransferTimeout:
                if left <= 0:
                    raise TransferTimeout(f"submission {target} is not done after {timeout_s:g} s") from None

    def close(self) -> None:
        self._stopping = True
        self._reaper.join()
        self._arena.close()  # waits for what is queued
        self._in_flight.clear()

    def _reap(self) -> None:
        done = 0
        while not self._stopping:
            with contextlib.suppress(TransferTimeout):
                done = self._arena.wait_done(done, WAIT_SLICE_S)
            # Also after a timeout: `submit` may have been slower to list its owners than the copies to be done.
            while self._in_flight and self._in_flight[0][0] <= done:
                self._in_flight.popleft()

"""Arena, slots and leases: the native core's objects with Python's ownership. Knows bytes and states, nothing of tensors."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from typing import Any

from . import _native
from ._native import byref
from .errors import HandleError, SampleFailed, SampleLost, StoreFull, TransferTimeout, TransportUnavailable

WAIT_SLICE_S = 0.25  # how long a wait sleeps before it looks whether the other side still lives


def check_not_forked(pid: int, what: str) -> None:
    if os.getpid() != pid:
        raise TransportUnavailable(
            f"this {what} was opened by process {pid} and forked into {os.getpid()}: its threads and locks stayed behind. Open one in each "
            "process, or start processes with spawn"
        )


class ReaderClosed(TransportUnavailable):
    """This reader was closed, with its source or because its arena was unlinked."""


class Arena:
    """The producing side: one region, slots of any size in it, a queue of copies into them. Thread-safe."""

    driver = "cuda"  # for GPUs; "cuda-unpinned" in tests

    def __init__(
        self, path: str, capacity_bytes: int, unread_ttl_s: float, num_slots: int = 0, driver: str = "host"
    ) -> None:
        self._lib = _native.load()
        self._pid = os.getpid()
        handle = ctypes.c_void_p()
        options = _native.ArenaOptions(
            path.encode(), driver.encode(), capacity_bytes, 0, int(unread_ttl_s * 1e6), num_slots, 0
        )
        code = self._lib.slow.hsx_arena_create(byref(options), byref(handle))
        if code == _native.FULL:
            raise StoreFull(str(self._lib.error(code)), capacity_bytes, 0, capacity_bytes)
        self._lib.check(code)
        self._handle: ctypes.c_void_p | None = handle
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._region_bytes = self.stats()["region_bytes"]

    def begin(
        self,
        key: bytes,
        head: bytes,
        data_bytes: int,
        payload_bytes: int,
        tail_capacity: int,
        consumers: int,
        marks: tuple[int, int] = (0, 0),
    ) -> _native.Slot:
        """Reserves a slot; `marks`: where its watermarks lie in the data, and how many.

        Raises `StoreFull` with the figures, `HandleError` if a live sample has this key."""
        slot = _native.Slot()
        spec = _native.SampleSpec(
            key, head, data_bytes, payload_bytes, len(key), len(head), tail_capacity, consumers, *marks
        )
        code = self._lib.fast.hsx_arena_begin(self._open(), byref(spec), byref(slot))
        if code == _native.FULL:
            message = str(self._lib.error(code))
            used = self.stats()
            if data_bytes > self._region_bytes:  # rows so narrow that their digests are what does not fit, ever
                raise StoreFull(message, data_bytes, self._region_bytes - used["extent_bytes"], self._region_bytes)
            raise StoreFull(message, payload_bytes, self.capacity_bytes - used["payload_bytes"], self.capacity_bytes)
        self._check(code)
        return slot

    def wait_space(self, timeout_s: float) -> None:
        """Returns when something was released, or after `timeout_s`, whichever comes first."""
        code = self._lib.slow.hsx_arena_wait_space(self._open(), int(timeout_s * 1e6))
        if code != _native.TIMEOUT:
            self._check(code)

    def attach(self, device: int) -> str:
        """Copies can come from that GPU from now on. Pins the region, which takes 60 ms a GiB; returns why that failed, or "".
        Raises `TransportUnavailable`: no CUDA here, or no such device."""
        warning = ctypes.c_char_p()
        self._check(self._lib.slow.hsx_arena_attach(self._open(), self.driver.encode(), device, byref(warning)))
        return (warning.value or b"").decode(errors="replace")

    def submit_copies(self, copies: Any, num_copies: int, device: int = -1, stream: int = 0) -> int:
        """`copies` is a ctypes array of `_native.Copy`, from host memory or from `device`, there behind what `stream` holds now.
        Returns the submission's number; it is done when `wait_done` says so."""
        submission = ctypes.c_uint64()
        fast, arena = self._lib.fast, self._open()
        if device < 0:
            code = fast.hsx_submit_copies(arena, copies, num_copies, None, byref(submission))
        else:
            code = fast.hsx_submit_device_copies(arena, device, copies, num_copies, stream, byref(submission))
        if code:
            self._check(code)
        return submission.value

    def submit_seal(self, slot: _native.Slot, tail: bytes, failed: bool) -> int:
        submission = ctypes.c_uint64()
        self._check(self._lib.fast.hsx_submit_seal(self._open(), slot, tail, len(tail), failed, byref(submission)))
        return submission.value

    def wait_done(self, after: int, timeout_s: float) -> int:
        """Number of submissions done, as soon as it is more than `after`; `TransferTimeout` otherwise."""
        done = ctypes.c_uint64()
        self._check(self._lib.slow.hsx_wait_done(self._open(), after, int(timeout_s * 1e6), byref(done)))
        return done.value

    def stats(self) -> dict[str, int]:
        stats = _native.Stats()
        self._check(self._lib.fast.hsx_arena_stats(self._open(), byref(stats)))
        return {name: getattr(stats, name) for name in _native.STATS}

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and os.getpid() == self._pid:
            self._lib.check(self._lib.slow.hsx_arena_close(handle))

    def _check(self, code: int) -> None:
        if code:
            error = self._lib.error(code)
            self._open()  # if it was closed in the middle of the call, that is what went wrong
            raise error

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise TransportUnavailable(f"arena {os.path.basename(self.path)} is closed")
        return self._handle


class Lease:
    """A sample's memory, held until `release` or until nothing refers to this object."""

    def __init__(self, reader: ArenaReader, raw: _native.Lease) -> None:
        self._reader: ArenaReader | None = reader
        self._raw = raw
        self.sequence: int = raw.sequence
        self.generation: tuple[int, int] = (raw.slot, raw.generation)  # never seen twice in an arena

    @property
    def head(self) -> dict[str, Any]:
        return _json(self._raw.head, self._raw.head_bytes, "head")

    @property
    def tail(self) -> dict[str, Any]:
        return _json(self._raw.tail, self._raw.tail_bytes, "tail")

    def address(self, offset: int, num_bytes: int) -> int:
        """Where `num_bytes` at `offset` of the slot's data lie. Raises `HandleError` outside of it: a head is not trusted."""
        if not 0 <= offset <= offset + num_bytes <= self._raw.data_bytes:
            raise HandleError(f"{num_bytes} bytes at {offset} are outside of the slot's {self._raw.data_bytes}")
        return int(self._raw.data or 0) + offset

    @property
    def unfinished(self) -> bool:
        """Whether the sample's data still arrived when the lease was taken."""
        return self._raw.state in (_native.OPEN, _native.SEALED)

    def native(self) -> _native.Lease:
        return self._raw

    def acknowledge(self) -> None:
        """Uses one of the sample's acknowledgements. Raises `SampleLost` if others have used them all since."""
        if self._reader is not None:
            self._reader._acknowledge(self._raw.slot, self._raw.generation)

    def release(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader._release(self._raw.slot, self._raw.generation)

    def __del__(self) -> None:
        self.release()


class ArenaReader:
    """The consuming side of one arena. Closes itself when it was told to and its last lease is gone."""

    def __init__(self, path: str) -> None:
        self._lib = _native.load()
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a lease can die in a garbage collection under any of these calls
        self._leases = 0
        self._closing = False
        self._handle: ctypes.c_void_p | None = None
        handle = ctypes.c_void_p()
        self._lib.check(self._lib.slow.hsx_reader_open(path.encode(), byref(handle)))
        self._handle = handle
        self.path = path

    def lease(self, key: bytes, ack: bool, timeout_s: float, early: bool = False) -> Lease:
        """Waits up to `timeout_s`, in one go, with `early` only for the sample's first rows.
        Raises `TransferTimeout`, `SampleLost` with the fate, `SampleFailed` with the reason."""
        with self._lock:
            if self._handle is None or self._closing:
                raise ReaderClosed(f"reader of {os.path.basename(self.path)} is closed")
            self._leases += 1  # keeps the handle open during the wait
        raw = _native.Lease()
        code = _native.SYSTEM
        flags = _native.LEASE_ACK * ack + _native.LEASE_EARLY * early
        try:
            library = self._lib.slow if timeout_s > 0 else self._lib.fast
            code = library.hsx_lease_wait(self._handle, key, len(key), flags, int(timeout_s * 1e6), byref(raw))
            error = None if code in (_native.OK, _native.FAILED) else self._lib.error(code)
        finally:
            if code not in (_native.OK, _native.FAILED):
                if raw.head:  # Ctrl-C came between the call's end and here
                    self._lib.fast.hsx_lease_release(self._handle, raw.slot, raw.generation)
                self._drop()
        if code == _native.OK:
            return Lease(self, raw)
        if code == _native.FAILED:
            lease = Lease(self, raw)
            tail = lease.tail
            lease.release()
            missing = {name: [(a, b) for a, b in ranges] for name, ranges in tail.get("missing", {}).items()}
            reason = str(tail.get("failed", "no reason given"))
            raise SampleFailed(f"sample {key.decode()!r} failed: {reason}", reason, missing)
        assert error is not None
        if code == _native.LOST:
            fate = _native.FATES.get(raw.fate, "lost")
            raise SampleLost(f"sample {key.decode()!r} is gone: {fate}", fate)
        if code == _native.TIMEOUT:
            raise TransferTimeout(f"sample {key.decode()!r} is not there after {timeout_s:g} s")
        raise error

    def native(self) -> Any:
        if self._handle is None:
            raise ReaderClosed(f"reader of {os.path.basename(self.path)} is closed")
        return self._handle

    def alive(self) -> tuple[bool, bool]:
        """Whether the producer lives, and whether it closed the arena in order."""
        with self._lock:
            if self._handle is None:
                raise ReaderClosed(f"reader of {os.path.basename(self.path)} is closed")
            alive, closed = ctypes.c_int(), ctypes.c_int()
            self._lib.check(self._lib.fast.hsx_reader_alive(self._handle, byref(alive), byref(closed)))
            return bool(alive.value), bool(closed.value)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # and not a look at the lock, which a forked child may find held for ever
        with self._lock:
            self._closing = True
            self._close_if_idle()

    @property
    def num_leases(self) -> int:
        return self._leases

    def _acknowledge(self, slot: int, generation: int) -> None:
        code = self._lib.fast.hsx_lease_ack(self._handle, slot, generation)
        if code == _native.LOST:
            raise SampleLost(str(self._lib.error(code)), "consumed")
        self._lib.check(code)

    def _release(self, slot: int, generation: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked child holds no lease: the lock is its parent's
        with self._lock:
            if self._handle is not None:
                self._lib.fast.hsx_lease_release(self._handle, slot, generation)
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            self._leases -= 1
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closing and not self._leases and self._handle is not None:
            handle, self._handle = self._handle, None
            self._lib.fast.hsx_reader_close(handle)

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.close()


def probe(path: str) -> dict[str, int]:
    """An arena looked at from outside: whether its producer lives, what is in it. Raises `ConfigError` for a file that is none."""
    info = _native.ProbeInfo()
    library = _native.load()
    library.check(library.fast.hsx_probe(path.encode(), byref(info)))
    return {name: getattr(info, name) for name in (*_native.PROBE_SIZES, *_native.PROBE_FLAGS)}


def _json(address: int | None, num_bytes: int, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(ctypes.string_at(address, num_bytes)) if address and num_bytes else {}
    except ValueError as error:
        raise HandleError(f"the {what} of a sample is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise HandleError(f"the {what} of a sample is not a JSON object")
    return parsed

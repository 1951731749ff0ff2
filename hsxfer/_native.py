"""The shared library through ctypes; the only file that knows it. Mirrors csrc/hsxfer.h, which `tests/test_boundaries.py` checks.

Two handles of one library: `fast` keeps the GIL, for calls of microseconds (a call that drops it has a p99 of 38 us beside one busy
Python thread, one that keeps it 1.3 us); `slow` drops it, for calls that may block.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from .errors import (
    ConfigError,
    HandleError,
    HsxferError,
    IntegrityError,
    SampleLost,
    StoreFull,
    TransferTimeout,
    TransportUnavailable,
)

ABI_VERSION = 1
NO_DIGEST = 2**64 - 1

OK, INVALID, FULL, TIMEOUT, LOST, FAILED, INTEGRITY, UNAVAILABLE, SYSTEM, BUSY, FORKED = range(11)

FATES = {0: "never seen", 1: "consumed", 2: "expired", 3: "closed", 4: "recycled"}


class ArenaOptions(Structure):
    _fields_ = [
        ("path", c_char_p),
        ("driver", c_char_p),
        ("capacity_bytes", c_uint64),
        ("region_bytes", c_uint64),
        ("unread_ttl_us", c_uint64),
        ("num_slots", c_uint32),
        ("device", c_uint32),
    ]


class Slot(Structure):
    _fields_ = [("generation", c_uint64), ("index", c_uint32), ("reserved", c_uint32)]


class SampleSpec(Structure):
    _fields_ = [
        ("key", c_char_p),
        ("head", c_char_p),
        ("data_bytes", c_uint64),
        ("payload_bytes", c_uint64),
        ("key_bytes", c_uint32),
        ("head_bytes", c_uint32),
        ("tail_capacity_bytes", c_uint32),
        ("consumers", c_uint32),
        ("marks_offset", c_uint64),
        ("num_marks", c_uint64),
    ]


class Copy(Structure):
    _fields_ = [
        ("src", c_void_p),
        ("src_stride_bytes", c_uint64),
        ("dst_offset", c_uint64),
        ("dst_stride_bytes", c_uint64),
        ("row_bytes", c_uint64),
        ("num_rows", c_uint64),
        ("digest_offset", c_uint64),
        ("digest_stride_bytes", c_uint64),
        ("slot", Slot),
        ("mark_offset", c_uint64),
        ("rows_per_mark", c_uint64),
        ("first_row", c_uint64),
    ]


STATS = (
    *("capacity_bytes", "payload_bytes", "region_bytes", "extent_bytes", "num_slots", "num_live"),
    *("num_begun", "num_ready", "num_failed", "num_consumed", "num_expired", "num_recycled"),
    *("num_submissions", "num_copies", "num_rows", "copied_bytes", "num_unread", "readers_attached"),
)


class Stats(Structure):
    _fields_ = [(name, c_uint64) for name in STATS]


class Lease(Structure):
    _fields_ = [
        ("head", c_void_p),
        ("tail", c_void_p),
        ("data", c_void_p),
        ("data_bytes", c_uint64),
        ("generation", c_uint64),
        ("sequence", c_uint64),
        ("slot", c_uint32),
        ("head_bytes", c_uint32),
        ("tail_bytes", c_uint32),
        ("fate", c_uint32),
        ("consumers", c_uint32),
        ("state", c_uint32),
    ]


class FetchOp(Structure):
    _fields_ = [
        ("src", c_void_p),
        ("dst", c_void_p),
        ("row_bytes", c_uint64),
        ("num_rows", c_uint64),
        ("digests", c_void_p),
        ("marks", c_void_p),
        ("rows_per_mark", c_uint64),
        ("first_row", c_uint64),
        ("tensor_rows", c_uint64),
        ("device_src", c_uint64),
    ]


LEASE_ACK, LEASE_EARLY = 1, 2
OPEN, SEALED = 1, 2  # states of a slot

PROBE_SIZES = (
    *("capacity_bytes", "file_bytes", "created_us", "unread_ttl_us"),
    *("num_ready", "num_open", "num_failed", "num_unread", "payload_bytes"),
)
PROBE_FLAGS = ("alive", "closed", "readers_attached")


class ProbeInfo(Structure):
    _fields_ = [
        *((name, c_uint64) for name in PROBE_SIZES),
        *((name, c_uint32) for name in (*PROBE_FLAGS, "reserved")),
    ]


_SIGNATURES: dict[str, list[Any]] = {
    "hsx_arena_create": [POINTER(ArenaOptions), POINTER(c_void_p)],
    "hsx_arena_close": [c_void_p],
    "hsx_arena_begin": [c_void_p, POINTER(SampleSpec), POINTER(Slot)],
    "hsx_arena_wait_space": [c_void_p, c_uint64],
    "hsx_arena_data": [c_void_p, Slot, POINTER(c_void_p), POINTER(c_uint64)],
    "hsx_submit_copies": [c_void_p, c_void_p, c_size_t, c_void_p, POINTER(c_uint64)],
    "hsx_arena_attach": [c_void_p, c_char_p, c_uint32, POINTER(c_char_p)],
    "hsx_submit_device_copies": [c_void_p, c_uint32, c_void_p, c_size_t, c_void_p, POINTER(c_uint64)],
    "hsx_submit_seal": [c_void_p, Slot, c_char_p, c_uint32, c_int, POINTER(c_uint64)],
    "hsx_wait_done": [c_void_p, c_uint64, c_uint64, POINTER(c_uint64)],
    "hsx_arena_stats": [c_void_p, POINTER(Stats)],
    "hsx_reader_open": [c_char_p, POINTER(c_void_p)],
    "hsx_reader_close": [c_void_p],
    "hsx_lease_wait": [c_void_p, c_char_p, c_uint32, c_int, c_uint64, POINTER(Lease)],
    "hsx_lease_ack": [c_void_p, c_uint32, c_uint64],
    "hsx_lease_release": [c_void_p, c_uint32, c_uint64],
    "hsx_reader_alive": [c_void_p, POINTER(c_int), POINTER(c_int)],
    "hsx_probe": [c_char_p, POINTER(ProbeInfo)],
    "hsx_fetch_stream": [c_uint32, POINTER(c_void_p)],
    "hsx_fetch_begin": [c_uint32, c_void_p, POINTER(Lease), c_void_p, c_size_t, POINTER(c_void_p)],
    "hsx_fetch_wait": [c_void_p, c_uint64, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_char_p)],
    "hsx_fetch_end": [c_void_p],
    "hsx_submit_encode": [
        *(c_uint32, c_void_p, c_char_p, c_void_p, c_uint64),
        *(c_void_p, c_uint64, c_uint32, c_uint32, c_uint32),
    ],
    "hsx_submit_screen": [c_uint32, c_void_p, c_char_p, c_void_p, c_uint64, c_void_p, c_uint32, c_uint32],
    "hsx_copy_rows": [c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_uint64, c_void_p, c_uint64],
    "hsx_verify_rows": [
        c_void_p,
        c_uint64,
        c_void_p,
        c_uint64,
        c_uint64,
        c_uint64,
        c_void_p,
        c_uint64,
        POINTER(c_uint64),
    ],
}

_ERRORS: dict[int, type[HsxferError]] = {
    INVALID: ConfigError,
    FULL: StoreFull,
    TIMEOUT: TransferTimeout,
    INTEGRITY: IntegrityError,
    UNAVAILABLE: TransportUnavailable,
    SYSTEM: TransportUnavailable,
    BUSY: HandleError,
    FORKED: TransportUnavailable,
}


class Library:
    """The functions of csrc/hsxfer.h under two calling conventions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fast = ctypes.PyDLL(str(path))
        self.slow = ctypes.CDLL(str(path))
        for handle in (self.fast, self.slow):
            for name, arguments in _SIGNATURES.items():
                function = getattr(handle, name)
                function.argtypes, function.restype = arguments, c_int
            handle.hsx_abi_version.restype = c_uint32
            handle.hsx_last_error.restype = c_char_p
            handle.hsx_kernels_missing.restype = c_char_p
        found = self.fast.hsx_abi_version()
        if found != ABI_VERSION:
            raise TransportUnavailable(
                f"{path.name} has ABI {found}, this hsxfer needs {ABI_VERSION}: reinstall hsxfer"
            )

    def check(self, code: int) -> None:
        """Raises the typed error of `code` with the library's sentence."""
        if code != OK:
            raise self.error(code)

    def error(self, code: int) -> HsxferError:
        message = self.fast.hsx_last_error().decode(errors="replace")
        if code == LOST:
            return SampleLost(message, "lost")
        return _ERRORS.get(code, HsxferError)(message)


@cache
def load() -> Library:
    """The library beside this file. Raises `TransportUnavailable` with what to do if it is not there."""
    path = Path(__file__).with_name("libhsxfer.so")
    try:
        return Library(path)
    except OSError as error:
        raise TransportUnavailable(
            f"hsxfer's native library did not load ({error}); reinstall hsxfer, or build it with pip install -e ."
        ) from None


__all__ = [
    "ArenaOptions",
    "Copy",
    "Lease",
    "Library",
    "ProbeInfo",
    "SampleSpec",
    "Slot",
    "Stats",
    "byref",
    "c_uint64",
    "load",
]

"""Copies from an arena into the memory of a GPU, which may start while the sample still arrives."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import NamedTuple

from . import _native
from ._native import byref
from .arena import ArenaReader, Lease
from .errors import HsxferError

log = logging.getLogger("hsxfer")


class GaveUp(HsxferError):
    """The sample failed, or others used it up, while it was being copied: a further look at it says which."""


class BadRow(HsxferError):
    """A row whose digest is not the one that was sent."""

    def __init__(self, op: int, row: int) -> None:
        super().__init__(f"row {row} of copy {op}")
        self.op, self.row = op, row


class Op(NamedTuple):
    """Rows one behind the other at both ends. `source` and `digests` are addresses in the lease's data, `target` one of the GPU; `marks`:
    (address, rows a mark, first row, all rows of the tensor)."""

    source: int
    target: int
    row_bytes: int
    num_rows: int
    digests: int | None
    marks: tuple[int, int, int, int] | None
    on_device: bool = False  # `source` is an address of the GPU


def stream_of(device: int) -> int:
    """The stream that copies to this GPU run on. Raises `TransportUnavailable`: no CUDA here, or no such device."""
    stream, library = ctypes.c_void_p(), _native.load()
    library.check(library.slow.hsx_fetch_stream(device, byref(stream)))
    return stream.value or 0


class Fetch:
    """A context manager; the targets and the lease must live until it ends, and it ends when the copies have."""

    _warned = False

    def __init__(self, device: int, reader: ArenaReader, lease: Lease, ops: Sequence[Op]) -> None:
        self._lib = _native.load()
        array = (_native.FetchOp * len(ops))()
        for raw, op in zip(array, ops, strict=True):
            marks, *rows = op.marks or (None, 0, 0, 0)
            raw.src, raw.dst, raw.row_bytes, raw.num_rows, raw.digests = op[:5]
            raw.marks = marks
            raw.rows_per_mark, raw.first_row, raw.tensor_rows = rows
            raw.device_src = op.on_device
        fetch = ctypes.c_void_p()
        self._lib.check(
            self._lib.slow.hsx_fetch_begin(
                device, reader.native(), byref(lease.native()), array, len(ops), byref(fetch)
            )
        )
        self._fetch: ctypes.c_void_p | None = fetch

    def wait(self, timeout_s: float) -> bool:
        """True when everything has landed and is right. Raises `GaveUp`, `BadRow`."""
        op, row, warning = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_char_p()
        code = self._lib.slow.hsx_fetch_wait(self._fetch, int(timeout_s * 1e6), byref(op), byref(row), byref(warning))
        if code == _native.TIMEOUT:
            return False
        if code == _native.FAILED:
            raise GaveUp("the sample failed while it was being copied")
        if code == _native.INTEGRITY:
            raise BadRow(op.value, row.value)
        self._lib.check(code)
        if warning.value and not Fetch._warned:
            Fetch._warned = True
            log.warning(
                "the arena could not be pinned, copies to the GPU run at a seventh of the speed (%s). Raise the limit on locked memory "
                "(ulimit -l)",
                warning.value.decode(errors="replace"),
            )
        return True

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, *exc: object) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._lib.slow.hsx_fetch_end(fetch)

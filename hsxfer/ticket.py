"""One sample being written: which rows have arrived, where they lie, what to say when it ends."""

from __future__ import annotations

import json
import operator
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from . import _native
from .encoding import encode
from .errors import ConfigError
from .handle import Handle
from .layout import Layout
from .ranks import cut
from .tensors import Rows

if TYPE_CHECKING:
    from .sink import Sink

MAX_REASON_CHARS = 300
MAX_MISSING_RANGES = 16
_LEADER_TAIL_BYTES, _SHARD_TAIL_BYTES = 2048, 16384

# The fields of a native copy, in order (csrc/hsxfer.h).
Plan = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, int]

Piece = tuple[int, int, int, int]  # write, first row, last row + 1, local row


class Ranges:
    """A set of rows as sorted, disjoint, non-adjacent `[start, stop)`."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        if start >= stop:
            return
        spans = self.spans
        if not spans or start > spans[-1][1]:
            spans.append((start, stop))
            return
        if start >= spans[-1][0]:  # chunks in order: the usual case
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
            return
        first = bisect_left(spans, start, key=lambda span: span[1])
        last = first
        while last < len(spans) and spans[last][0] <= stop:
            start, stop = min(start, spans[last][0]), max(stop, spans[last][1])
            last += 1
        spans[first:last] = [(start, stop)]

    def reaches(self, row: int) -> bool:
        """Whether `row` or one behind it is in the set."""
        return bool(self.spans) and row < self.spans[-1][1]

    def missing(self, rows: int) -> list[tuple[int, int]]:
        gaps, at = [], 0
        for start, stop in self.spans:
            if start > at:
                gaps.append((at, start))
            at = stop
        if at < rows:
            gaps.append((at, rows))
        return gaps


class Ticket:
    """Made by `Sink.begin`. Ends with `commit` or `abort`, once. On a rank that does not send every call does nothing."""

    def __init__(self, sink: Sink, handle: Handle, layout: Layout, index: int) -> None:
        self._sink = sink
        self.handle = handle
        self.layout = layout
        self.slot: _native.Slot | None = None
        self.tail_capacity = _SHARD_TAIL_BYTES if handle.policy == "shard" else _LEADER_TAIL_BYTES
        self._index = index
        self._ended = self._refused = False
        self._failed: str | None = None  # why the sample will have failed, if so
        self._written = {name: Ranges() for name in layout.placements}
        self._devices: dict[str, int] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self._given_up: dict[str, list[Piece]] = {}
        self._num_writes = 0

    def write(self, name: str, start: int, tensor: Any, *, snapshot: bool = False) -> None:
        """Rows `[start, start + len(tensor))` of tensor `name`; returns before they have moved. Raises `ConfigError`: unknown name, other
        dtype or width, rows out of range, sample sealed. Nothing is written then."""
        self._sink.write_many([(self, name, start, tensor)], snapshot=snapshot)

    def commit(self) -> Handle:
        """Seals the sample. With rows missing it fails, and its consumer's `get` raises `SampleFailed` naming them."""
        if self._end():
            rows = self.handle.rows[1]
            if self._failed is None and any(written.missing(rows) for written in self._written.values()):
                self._failed = "rows were never written"
            if self._failed is None and any(self._given_up.values()):
                self._failed = "rows written again used up the room of this rank's part"
            self._sink._seal(self, *self._tail())
        return self.handle

    def abort(self, reason: str) -> Handle:
        """Seals the sample as failed for `reason`."""
        if self._end():
            self._failed = _said(reason)
            self._sink._seal(self, *self._tail())
        return self.handle

    def _end(self) -> bool:
        """Whether there is something to seal: not on a silent rank, not after a refusal, not twice."""
        with self._sink._locked():  # its owner may commit while the sink closes
            first, self._ended = not self._ended, True
        return first and self.slot is not None and not self._refused

    def refuse(self, slot: _native.Slot | None, reason: str) -> None:
        """There was no room: `slot` holds no data, and the sample fails for `reason`; without a slot nobody is told."""
        self.slot, self._failed, self._refused = slot, _said(reason), True
        if slot is not None:
            self._sink._seal(self, *self._tail())

    def spoil(self, reason: str) -> None:
        """The sample will have failed for `reason`, whatever becomes of it."""
        self._failed = self._failed or _said(reason)

    def check(self, sink: Sink, name: str, start: int, rows: Rows) -> None:
        """Raises `ConfigError` for a write that cannot be."""
        if sink is not self._sink:
            raise ConfigError(f"sample {self.handle.key!r} is another sink's")
        if type(start) is not int:
            raise ConfigError(f"sample {self.handle.key!r}: start {start!r} is not an int")
        place = self.layout.placements.get(name)
        if place is None:
            raise ConfigError(
                f"sample {self.handle.key!r} has no tensor {name!r}, but {', '.join(self.layout.placements)}"
            )
        if self._ended:
            raise ConfigError(f"sample {self.handle.key!r} is sealed: no more rows of {name!r}")
        spec = place.spec
        if rows.dtype != spec.dtype or rows.shape[1:] != spec.shape[1:]:
            raise ConfigError(
                f"sample {self.handle.key!r}: rows of {name!r} are {spec.dtype} {list(spec.shape[1:])}, "
                f"not {rows.dtype} {list(rows.shape[1:])}"
            )
        # The order of writes is kept on each device only.
        if self._devices.get(name, rows.device) != rows.device:
            raise ConfigError(f"sample {self.handle.key!r}: {name!r} is written from two devices; send it from one")
        if not 0 <= start <= start + rows.num_rows <= spec.shape[0]:
            raise ConfigError(
                f"sample {self.handle.key!r}: rows [{start}, {start + rows.num_rows}) of {name!r} are outside of [0, {spec.shape[0]})"
            )

    def encode(self, name: str, rows: Rows) -> Rows:
        """The rows as this sink sends them (`?encode=`)."""
        encoding = self.layout.placements[name].encoding
        return rows if encoding == "none" else encode(rows, encoding)

    def plan(self, name: str, start: int, rows: Rows) -> Plan | None:
        """Takes note of a checked write and says what this rank copies for it, if anything."""
        place, slot, written = self.layout.placements[name], self.slot, self._written[name]
        self._devices[name] = rows.device
        stop = start + rows.num_rows
        if slot is None or self._refused:
            return None
        source, local, count = rows.pointer, start, rows.num_rows
        if self.handle.policy == "shard":
            if written.reaches(start):
                self._forget_hidden(name, start, stop)
            first, last = cut(start, stop, self._index, len(self.handle.ranks))
            source, local, count = (
                source + (first - start) * rows.stride_bytes,
                self._keep_piece(name, first, last, stop),
                last - first,
            )
        written.add(start, stop)
        if count == 0 or self._failed is not None:
            return None
        digests = _native.NO_DIGEST if place.digests is None else place.digests + 8 * local
        target, row_bytes = place.offset + local * place.row_bytes, place.row_bytes
        return (
            source,
            rows.stride_bytes,
            target,
            row_bytes,
            row_bytes,
            count,
            digests,
            8,
            slot.generation,
            slot.index,
            0,
            place.marks,
            place.rows_per_mark,
            local,
        )

    def _forget_hidden(self, name: str, start: int, stop: int) -> None:
        """Drops what the write `[start, stop)` hides of this rank's pieces: a request that starts again needs their places.
        Every rank sees every write, so the ranks together send what hides them."""
        for table in (self._pieces, self._given_up):
            kept: list[Piece] = []
            for write, first, last, local in table.get(name, ()):
                if first < start:
                    kept.append((write, first, min(start, last), local))
                if stop < last:
                    kept.append((write, max(stop, first), last, local + max(stop - first, 0)))
            table[name] = kept

    def _keep_piece(self, name: str, first: int, last: int, stop: int) -> int:
        """Where rows `[first, last)` of a write that ends at `stop` go in this rank's part: the first place that is free.

        If there is none, rows behind the write are given up, from the end: a request that starts again with other chunks comes to
        them. If it never does, the sample fails.
        """
        self._num_writes += 1
        if first == last:
            return 0
        pieces, room = self._pieces.setdefault(name, []), self.layout.placements[name].rows
        at = _first_fit(pieces, last - first)
        while at + last - first > room and (ahead := [piece for piece in pieces if piece[1] >= stop]):
            pieces.remove(farthest := max(ahead, key=lambda piece: piece[1]))
            self._given_up.setdefault(name, []).append(farthest)
            at = _first_fit(pieces, last - first)
        if at + last - first > room:
            self._failed = f"this rank's part has room for {room} rows of {name!r}, and rows written again used it up"
        pieces.append((self._num_writes, first, last, at))
        return at

    def _tail(self) -> tuple[bytes, bool]:
        """What the sample's end says (docs/format.md, 4), and whether it is a failure."""
        if self._failed is None:
            if not self._pieces:
                return b"{}", False
            tail = _json({"pieces": self._pieces})
            if len(tail) <= self.tail_capacity:
                return tail, False
            self._failed = f"{self._num_writes} writes are too many to describe under policy shard"
        told: dict[str, Any] = {"failed": self._failed[:MAX_REASON_CHARS]}
        if not self._refused:
            gaps = {
                name: written.missing(self.handle.rows[1])[:MAX_MISSING_RANGES]
                for name, written in self._written.items()
            }
            told["missing"] = {name: spans for name, spans in gaps.items() if spans}
        tail = _json(told)
        return (tail if len(tail) <= self.tail_capacity else _json({"failed": told["failed"]})), True


def _first_fit(pieces: list[Piece], rows: int) -> int:
    """The first local row behind which as many are free."""
    at = 0
    for _, start, stop, local in sorted(pieces, key=lambda piece: piece[3]):
        if local - at >= rows:
            break
        at = local + stop - start
    return at


def row_number(start: Any) -> int:
    return start if type(start) is int or not hasattr(start, "_row_number__") else operator.index(start)


def _said(reason: object) -> str:
    return str(reason) if reason else "no reason given"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()

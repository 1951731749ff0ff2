"""What a rank does with hidden states, in terms that no version of the engine shares with another."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

from .counters import Counters, StatsFile, as_dict
from .guard import nothing, survive
from .samples import Sample, make_key

NAME = "hidden_states"

MAX_RID_CHARS = 1024  # that a handle holds

NO_HANDLE = {"error": "hsxfer could not take this request's hidden states; the server's log says why"}


@dataclass(frozen=True)
class Wanted:
    """A request that wants hidden states of `rows` prompt tokens: `token_ids`, or None where the prompt was given as embeddings.

    `refusal`: why they cannot be carried, if so.
    """

    rid: str
    rows: int
    token_ids: Any
    refusal: str = ""


@dataclass(frozen=True)
class Piece:
    """Rows of one request in one forward pass: `[offset, offset + rows)` of the batch are its positions from `start` on."""

    sample: Sample
    offset: int
    start: int
    rows: int


class Plugin:
    """The state of one scheduler process. Every method is called from its one thread.

    A row is `width` numbers of type `dtype`, `row_bytes` in all.
    """

    def __init__(self, sink: Any, label: str, width: int, dtype: str, row_bytes: int, stats_dir: str = "") -> None:
        self.sink = sink
        self.label = label
        self.sends: bool = sink.sends
        self.width = width
        self.dtype = dtype
        self.row_bytes = row_bytes
        self.counters = Counters()
        self._reserved: dict[int, Sample] = {}
        self._orphans: deque[Any] = deque()
        self._stats_file = StatsFile(os.path.join(stats_dir, f"{label}.json"), self.stats) if stats_dir else None

    def stats(self) -> dict[str, Any]:
        """This rank's counters and its sink's."""
        return {"rank": self.label, "pid": os.getpid(), **as_dict(self.counters), "sink": self.sink.stats()}

    def poll(self) -> None:
        """Once a scheduler loop: give back what dropped requests held, write the counters."""
        while self._orphans:
            self.counters.num_failed += 1
            self._orphans.popleft().abort("the request ended before its prompt was processed")
        if self._stats_file:
            self._stats_file.poll()

    # Receiving, on the rank that sends.

    def never_fits(self, wanted: Wanted) -> bool:
        """Whether the request's rows are more than the whole store holds."""
        return wanted.rows * self.row_bytes > int(self.sink.options.capacity_bytes)

    def reserve(self, wanted: Wanted, number: int) -> None:
        """Make room for a request's rows, without waiting. Raises `StoreFull`."""
        sample = self._sample(wanted, number)
        sample.ticket = self.sink.begin(sample.key, block_s=0, **self._description(wanted))
        sample.handle = sample.ticket.handle.to_dict()
        self._reserved[number] = sample

    def reject(self, wanted: Wanted, number: int, reason: str) -> None:
        """No room, or never: the request goes on, and whoever gets its handle is told `reason` at once."""
        self.counters.num_rejected += 1
        sample = self._sample(wanted, number)
        sample.handle = self.sink.reject(sample.key, reason=reason, **self._description(wanted)).to_dict()
        self._reserved[number] = sample

    def _sample(self, wanted: Wanted, number: int) -> Sample:
        return Sample(wanted.rid, make_key(wanted.rid, number), wanted.rows, self._orphans)

    def _description(self, wanted: Wanted) -> dict[str, Any]:
        return {
            "tensors": {NAME: ((wanted.rows, self.width), self.dtype)},
            "token_ids": wanted.token_ids,
            "rid": wanted.rid if len(wanted.rid) <= MAX_RID_CHARS else None,
        }

    def claim(self, number: int, rid: str) -> Sample | None:
        """The sample reserved for a received request; the engine's own object of that request holds it from now on."""
        sample = self._reserved.get(number)
        if sample is None or sample.rid != rid:
            return None
        return self._reserved.pop(number)

    # Forward passes.

    def take(self, pieces: list[Piece], hidden: Any, num_rows: int, snapshot: bool) -> None:
        """Queue the open samples' rows of `hidden`, `[at least num_rows, width]`, in one call; on failure those samples fail.

        Positions past a sample's rows are tokens generated since, which it does not carry. `snapshot`: the engine will
        overwrite `hidden`.
        """
        pieces = [piece for piece in pieces if piece.sample.open and piece.start < piece.sample.rows]
        if not pieces:
            return
        error = survive("queue hidden states", _describe, self._write, pieces, hidden, num_rows, snapshot)
        if error:
            for piece in pieces:
                self.fail(piece.sample, error)

    def _write(self, pieces: list[Piece], hidden: Any, num_rows: int, snapshot: bool) -> str:
        if hidden is None:
            return "the engine computed no hidden states for this forward pass"
        shape = tuple(hidden.shape)
        if len(shape) != 2 or shape[0] < num_rows or shape[1] != self.width:
            return f"the engine gave hidden states of shape {list(shape)} where [{num_rows}, {self.width}] was expected"
        if snapshot:
            hidden = hidden.clone()
        writes = []
        for piece in pieces:
            rows = min(piece.rows, piece.sample.rows - piece.start)
            writes.append((piece.sample.ticket, NAME, piece.start, hidden[piece.offset : piece.offset + rows]))
            self.counters.num_rows += rows
            self.counters.num_bytes += rows * self.row_bytes
        self.counters.num_forwards += 1
        self.counters.num_writes += len(writes)
        self.sink.write_many(writes)
        return ""

    # Results.

    def commit(self, sample: Sample) -> None:
        """The prompt is through."""
        if sample.open:
            self.counters.num_committed += 1
            survive("commit a sample", nothing, sample.commit)

    def fail(self, sample: Sample, reason: str) -> None:
        """Give a sample up."""
        if sample.open:
            self.counters.num_failed += 1
            survive("abort a sample", nothing, sample.fail, reason)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

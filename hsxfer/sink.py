"""The producer: open a ticket, write rows by position, commit or abort. Nothing here waits for bytes to move."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from . import _native
from .arena import WAIT_SLICE_S, check_not_forked
from .config import Options, check_seconds
from .describe import Shapes, check_identity, describe
from .errors import ConfigError, HsxferError, StoreFull, TransportUnavailable
from .handle import Handle, TensorSpec
from .layout import Layout, encode_head, place
from .outbox import Outbox, unless_done
from .ranks import Rank, part_rows, senders
from .tensors import Rows, rows_of
from .ticket import Ticket, row_number
from .transports import resolve

log = logging.getLogger("hsxfer")


class Sink:
    """Sends the samples of one rank. Thread-safe. Use `open_sink`; a context manager that closes itself.

    `sends` is False on ranks that the policy leaves out: their tickets have the same handles and do nothing at all.
    """

    def __init__(
        self, options: Options, rank: Rank, ranks: tuple[str, ...], outbox: Outbox | None, identity: Mapping[str, Any]
    ) -> None:
        self.options = options
        self.rank = rank
        self.ranks = ranks
        self.store: str = identity["store"]
        self.instance: str = identity["instance"]
        self._identity = identity
        self._outbox = outbox
        self._arena = outbox.arena if outbox is not None else None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._num_puts = self._num_writes = self._num_dropped = self._num_refused = self._num_keys = 0
        self._warned_unread = False
        self._closed = self._finished = False  # the second when `close` was not interrupted
        _open_sinks.add(self)

    @property
    def sends(self) -> bool:
        return self._arena is not None

    def put(
        self,
        tensors: Mapping[str, Any],
        key: str | None = None,
        *,
        token_ids: Any = None,
        meta: Mapping[str, Any] | None = None,
        rid: str | None = None,
        consumers: int = 1,
        snapshot: bool = False,
    ) -> Handle:
        """Sends a whole sample: tensors of `[rows, ...]` each, equal rows. Returns before bytes move.

        Tensors on a GPU are read after what the caller's current stream holds now. The tensors must not be modified until
        `flush` returns or the sample is published; `snapshot=True` copies them first, on the caller's stream, for those that
        cannot hold still (the outputs of a CUDA graph that is replayed). Raises `ConfigError` or
        `HandleError` for what cannot be sent, and what `begin` raises.
        """
        rows = {name: rows_of(tensor, snapshot) for name, tensor in tensors.items()} if self.sends else {}
        shapes = {name: (row.shape, row.dtype) for name, row in rows.items()} or _shapes(tensors)
        ticket = self.begin(key, shapes, token_ids=token_ids, meta=meta, rid=rid, consumers=consumers)
        if self.sends:
            self._write_all(ticket, rows)
        self._num_puts += 1
        return ticket.commit()

    def begin(
        self,
        key: str | None,
        tensors: Shapes,
        *,
        token_ids: Any = None,
        meta: Mapping[str, Any] | None = None,
        rid: str | None = None,
        consumers: int = 1,
        block_s: float | None = None,
    ) -> Ticket:
        """Reserves room for `{name: (shape, dtype)}` and returns the sample's ticket; `ticket.handle` exists from here on.

        A full arena is treated as the URL says (`on_full`, `block_s`). With `block_s` given, this call tries for so long
        (0: once) and raises `StoreFull` leaving no trace; otherwise a consumer of the sample that found no room gets a
        `SampleFailed` at once.
        """
        ticket, head, ids = self._describe(key, tensors, token_ids, meta, rid, consumers)
        if self._arena is None:
            return ticket
        try:
            self._reserve(ticket, head, self._patience(block_s))
        except StoreFull as error:
            if block_s is not None:
                raise
            self._refuse(ticket, head, str(error))
            if self.options.on_full != "drop":
                raise
            self._num_dropped += 1
            return ticket
        with self._lock:
            self._tickets[id(ticket)] = ticket
        if ids is not None:
            self._write_all(ticket, {"token_ids": rows_of(ids)})
        return ticket

    def reject(
        self,
        key: str | None,
        tensors: Shapes,
        reason: str,
        *,
        token_ids: Any = None,
        meta: Mapping[str, Any] | None = None,
        rid: str | None = None,
        consumers: int = 1,
    ) -> Handle:
        """Records a sample that failed before it began: its consumer gets `SampleFailed(reason)` at once. Never blocks."""
        ticket, head, _ = self._describe(key, tensors, token_ids, meta, rid, consumers)
        if self._arena is not None:
            self._refuse(ticket, head, reason)
        return ticket.handle

    def write_many(self, writes: Iterable[tuple[Ticket, str, int, Any]], *, snapshot: bool = False) -> None:
        """`(ticket, name, start, tensor)` each: rows `[start, start + len(tensor))` of that sample's tensor.

        All are checked before any is queued. One native call and one event for all from the same device and stream (of many
        from a GPU, one for every 64, so that the first copies run while the others are prepared). Rows may be written again
        until the sample is sealed; the last write holds.
        """
        if self._arena is None:
            return
        self._write(
            [(ticket, name, row_number(start), rows_of(tensor, snapshot)) for ticket, name, start, tensor in writes]
        )

    def flush(self, timeout_s: float = 30.0) -> None:
        """Waits until everything submitted so far has moved and its sources may be modified. Raises `TransferTimeout`."""
        self._check_open()
        check_seconds("timeout_s", timeout_s)
        if self._outbox is not None:
            self._outbox.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counts since `open_sink`, and what is in use now, in bytes. All zero on a rank that does not send."""
        self._check_open()
        native = self._arena.stats() if self._arena is not None else dict.fromkeys(_native.STATS, 0)
        return {
            "sends": int(self.sends),
            "num_puts": self._num_puts,
            "num_writes": self._num_writes,
            "num_bytes": native["copied_bytes"],
            "num_published": native["num_ready"],
            "num_dropped": self._num_dropped,
            "num_refused": self._num_refused,
            "used_bytes": native["payload_bytes"],
            "readers": native["readers_attached"],
            **native,
        }

    def close(self) -> None:
        """Fails open tickets, waits for what is queued, closes the arena. Unread samples stay until read or expired."""
        if self._finished or os.getpid() != self._pid:
            return
        for ticket in list(self._tickets.values()):
            ticket.abort("the sink was closed")
        with self._lock:
            self._closed = True
        _open_sinks.discard(self)
        if self._arena is not None and self._outbox is not None:
            with suppress(TransportUnavailable):  # a close that was interrupted had closed it already
                stats = self._arena.stats()
                if stats["num_unread"]:
                    left = (self.store, stats["num_unread"], stats["payload_bytes"])
                    log.warning("%s closes with %d unread samples, %d bytes", *left)
            self._outbox.close()
        self._finished = True

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _describe(
        self, key: str | None, tensors: Shapes, token_ids: Any, meta: Any, rid: str | None, consumers: int
    ) -> tuple[Ticket, bytes, Any]:
        self._check_open()
        if key is None:
            with self._lock:
                self._num_keys += 1
                key = f"put-{self._num_keys}"
        handle, ids = describe(self._identity, key, tensors, token_ids, rid, consumers)
        rows, specs = handle.rows[1], dict(handle.tensors)
        if ids is not None:
            specs["token_ids"] = TensorSpec("int64", (rows,))
        layout: Layout = place(
            specs, part_rows(rows, len(self.ranks)), self.options.digest, len(self.ranks) == 1, self.options.encode
        )
        index = self.ranks.index(self.rank.label) if self.sends else 0
        head = encode_head(handle, layout, meta) if self.sends else b""
        return Ticket(self, handle, layout, index), head, ids

    def _patience(self, block_s: float | None) -> float:
        if block_s is not None:
            return check_seconds("block_s", block_s)
        return self.options.block_s if self.options.on_full == "block" else 0.0

    def _reserve(self, ticket: Ticket, head: bytes, patience_s: float) -> None:
        assert self._arena is not None
        handle, layout = ticket.handle, ticket.layout
        key, deadline = handle.key.encode(), time.monotonic() + patience_s
        while True:
            try:
                ticket.slot = self._arena.begin(
                    *(key, head, layout.data_bytes, layout.payload_bytes),
                    *(ticket.tail_capacity, handle.consumers, layout.marks),
                )
                return
            except StoreFull as error:
                left = deadline - time.monotonic()
                if left <= 0 or error.needed_bytes > error.capacity_bytes:
                    self._warn_if_unread()
                    raise
            self._arena.wait_space(min(left, WAIT_SLICE_S))
            self._check_open()

    def _refuse(self, ticket: Ticket, head: bytes, reason: str) -> None:
        assert self._arena is not None
        handle, slot = ticket.handle, None
        try:
            slot = self._arena.begin(handle.key.encode(), head, 0, 0, ticket.tail_capacity, handle.consumers)
        except StoreFull as error:
            log.warning("%s cannot even tell the consumer of %r that it failed: %s", self.store, handle.key, error)
        ticket.refuse(slot, reason)
        with self._lock:
            self._num_refused += 1

    def _write_all(self, ticket: Ticket, rows: Mapping[str, Rows]) -> None:
        """Whole tensors of a sample that nobody else can end: it fails, and gives its room back, if they cannot be written."""
        with unless_done(lambda error: ticket.abort(f"it could not be written: {error}")):
            self._write([(ticket, name, 0, row) for name, row in rows.items()])

    def _write(self, writes: list[tuple[Ticket, str, int, Rows]]) -> None:
        with self._locked():
            self._check_open()
            for ticket, name, start, rows in writes:
                ticket.check(self, name, start, rows)
            if self.options.encode != "none":
                writes = [(ticket, name, start, ticket.encode(name, rows)) for ticket, name, start, rows in writes]
            if self._outbox is not None:
                self._outbox.attach({rows.device for _, _, _, rows in writes})
                planned = (
                    (plan, rows.device, rows.stream)
                    for ticket, name, start, rows in writes
                    if (plan := ticket.plan(name, start, rows))
                )
                with unless_done(lambda error: _spoil(writes, error)):
                    self._outbox.submit(planned, [rows.owner for _, _, _, rows in writes])
            self._num_writes += len(writes)

    def _seal(self, ticket: Ticket, tail: bytes, failed: bool) -> None:
        with self._locked():
            self._tickets.pop(id(ticket), None)
            if self._outbox is not None and ticket.slot is not None:
                self._outbox.seal(ticket.slot, tail, failed)

    def _warn_if_unread(self) -> None:
        if self._warned_unread or self._arena is None:
            return
        stats = self._arena.stats()
        if not stats["readers_attached"]:
            self._warned_unread = True
            log.warning(
                "%s is full (%d of %d bytes, %d samples unread) and nobody reads it",
                *(self.store, stats["payload_bytes"], stats["capacity_bytes"], stats["num_unread"]),
            )

    def _locked(self) -> threading.Lock:
        check_not_forked(self._pid, "sink")  # a forked child may find the lock held for ever
        return self._lock

    def _check_open(self) -> None:
        check_not_forked(self._pid, "sink")
        if self._closed:
            raise TransportUnavailable(f"the sink of {self.store} is closed")


def open_sink(
    url: str,
    rank: Rank | None = None,
    policy: str = "leader",
    *,
    instance: str | None = None,
    model: str | None = None,
    layers: Sequence[int] | None = None,
    convention: str | None = None,
) -> Sink:
    """Opens the producing side of a store on this rank; a rank that the policy leaves out touches nothing.

    `instance` names the server, equal on all its ranks and new at each start (default: `HSXFER_INSTANCE`, else made up,
    which a group of several sending ranks cannot use). `model`, `layers` and `convention` go into every handle. Raises
    `ConfigError`, `StoreFull` (the capacity cannot be reserved), `TransportUnavailable`.
    """
    parsed, transport = resolve(url)
    rank = rank or Rank()
    ranks = senders(rank, policy)
    instance = instance or os.environ.get("HSXFER_INSTANCE") or (secrets.token_hex(8) if len(ranks) == 1 else None)
    if instance is None:
        raise ConfigError("several ranks send: give all of them the same instance=, or HSXFER_INSTANCE")
    identity = check_identity(str(parsed), instance, policy, ranks, model, layers, convention)
    outbox = None
    if rank.label in ranks:
        outbox = Outbox(transport.open_arena(parsed, instance, rank.label), str(parsed), parsed.options.device)
        try:
            outbox.prepare()
        except HsxferError:
            outbox.close()
            raise
    return Sink(parsed.options, rank, ranks, outbox, identity)


def _spoil(writes: list[tuple[Ticket, str, int, Rows]], error: object) -> None:
    for ticket, *_ in writes:  # rows were noted that will not come
        ticket.spoil(f"its rows could not be queued: {error}")


def _shapes(tensors: Mapping[str, Any]) -> Shapes:
    """Of tensors that are not sent, so not looked at any closer."""
    sized = {name: tensor if hasattr(tensor, "dtype") else rows_of(tensor) for name, tensor in tensors.items()}
    return {name: (tensor.shape, str(tensor.dtype)) for name, tensor in sized.items()}


# Not weak: a sink that its owner forgot still closes in order at the end, or its consumers would take the producer for dead.
_open_sinks: set[Sink] = set()


@atexit.register
def _close_sinks() -> None:
    for sink in list(_open_sinks):
        sink.close()

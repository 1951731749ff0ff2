"""The consumer: from a handle to tensors. Every wait looks four times a second whether the producer still lives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from .arena import WAIT_SLICE_S, ArenaReader, Lease, ReaderClosed, check_not_forked
from .config import check_seconds
from .delivery import deliver
from .errors import ConfigError, HandleError, IntegrityError, SampleLost, TransferTimeout, TransportUnavailable
from .foreign import HOST
from .handle import Handle, check_key
from .prefetch import Prefetcher
from .sample import TOKEN_IDS, Part, Sample
from .tensors import check_framework
from .tensors_cuda import parse_device
from .transports import Store, resolve

ABSENT_S = 4.0  # an arena that a handle names and that does not appear in this time is lost, not late
_POLL_S = (0.0005, 0.02)

HandleLike = Handle | str | bytes | Mapping[str, Any]


class Source:
    """Reads samples of one store. Thread-safe. Use `open_source`; a context manager that closes itself.

    Samples outlive their source: memory stays mapped while a tensor over it lives.
    """

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self._store = store
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False

    def get(
        self,
        handle: HandleLike,
        *,
        names: Iterable[str] | None = None,
        rows: slice | None = None,
        device: str = "cpu",
        framework: str = "torch",
        timeout_s: float = 30.0,
        ack: bool = True,
        verify: bool | str = "auto",
        copy: bool = False,
        raw: bool = False,
    ) -> Sample:
        """Waits until the sample is complete and returns it.

        `handle`: a Handle, its JSON, its dict, or a sample's key. `names`: only these tensors. `rows`: only these absolute
        positions, a slice without a step. `device="cuda:N"`: tensors of the caller's own on that GPU; their copies start while
        the sample still arrives, and the slot is free when they end. `framework`: "torch", "numpy", "cupy" (on a GPU),
        or "memoryview", which needs neither and gives floats of 8 and 16 bits as the unsigned integers of their bits.
        `verify`: "auto" checks the digests of whatever is copied, True also those of zero-copy views (one pass over the
        bytes), False none. `copy=True`: tensors of the caller's own instead of read-only views. `raw=True`: tensors that were
        sent encoded (`?encode=`) as their bytes, uint8 `[rows, row_bytes]` (hsxfer/encoding.py). `ack=False`: does not use one
        of the sample's `consumers`.

        Raises `HandleError` (not this store's, malformed), `ConfigError` (an argument; the sample is untouched),
        `TransferTimeout`, `SampleFailed` (the producer's reason, the rows missing), `SampleLost` (consumed, expired, its
        producer died), `IntegrityError`.
        """
        self._check_open()
        check_framework(framework)
        gpu = parse_device(framework, device)
        if not (isinstance(verify, bool) or verify == "auto"):
            raise ConfigError(f"verify={verify!r} is not True, False or 'auto'")
        expected, key = self._identify(handle)
        deadline = _Deadline(timeout_s)
        name = key.encode()
        with ExitStack() as on_error:  # a traceback that somebody keeps must not keep the leases
            # A look without acknowledging first: bad arguments and contradictions must not use the sample up.
            first, lease = self._find(expected, key, name, deadline, gpu != HOST)
            on_error.callback(lease.release)
            part = Part(lease, expected)
            if self.name != part.handle.store or key != part.handle.key:
                raise HandleError(f"the arena describes {key!r} as {part.handle.key!r} of {part.handle.store}")
            sample = Sample(part.handle, framework, names, rows, raw)
            sample.accept(part)
            readers, parts = [first], [part]
            if len(part.handle.ranks) > 1:
                readers = [self._await_reader(part.handle.instance, label, deadline) for label in part.handle.ranks]
                parts = []
                for reader in readers:
                    parts.append(Part(self._lease(reader, name, deadline), part.handle))
                    on_error.callback(parts[-1].lease.release)
            if gpu != HOST:
                names = sample.keys() + ([TOKEN_IDS] if TOKEN_IDS in part.specs else [])
                try:
                    tensors = deliver(
                        *(gpu, framework, names, sample.rows, readers, parts, verify is not False, raw),
                        *(lambda: self._must_live(first, name), deadline.left_s),
                    )
                except IntegrityError:  # it was read, so its memory must not wait for another reader
                    for held in parts if ack else ():
                        held.lease.acknowledge()
                    raise
                sample.deliver(tensors, part.meta)
            for held in parts if ack else ():
                held.lease.acknowledge()
            if gpu == HOST:
                sample.load(parts, verify, copy)
                on_error.pop_all()
        return sample

    def prefetch(self, handles: Iterable[HandleLike], *, depth: int = 4, **options: Any) -> Iterator[Sample]:
        """Yields `get(handle, **options)` for each handle, in order, up to `depth` samples ahead of the loop.

        `handles` is read in a thread of its own, so it may be a generator that waits, for a server's replies say. An error
        is raised at the sample it belongs to and ends the iteration. Samples fetched ahead count as read, also when the loop
        stops early.
        """
        if depth < 1:
            raise ConfigError(f"depth {depth} is not at least 1")
        self._check_open()
        return _prefetch(self, handles, depth, options)

    def close(self) -> None:
        """Samples and tensors already handed out stay valid."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                self._store.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------------------------------

    def _identify(self, handle: HandleLike) -> tuple[Handle | None, str]:
        if isinstance(handle, str) and not handle.lstrip().startswith("{"):
            return None, check_key(handle)
        parsed = handle if isinstance(handle, Handle) else Handle.from_json(handle)
        parsed.check_names()
        if parsed.store != self.name:
            raise HandleError(f"this handle is of {parsed.store}; this source reads {self.name} only")
        return parsed, parsed.key

    def _find(
        self, handle: Handle | None, key: str, name: bytes, deadline: _Deadline, early: bool
    ) -> tuple[ArenaReader, Lease]:
        if handle is not None:
            reader = self._await_reader(handle.instance, handle.ranks[0], deadline)
            return reader, self._lease(reader, name, deadline, early and len(handle.ranks) == 1)
        pause = _POLL_S[0]
        lost: SampleLost | None = None
        last_word: SampleLost | None = None
        while True:
            with self._lock:
                readers = list(self._store.readers())
            num_gone = 0
            for reader in readers:
                try:
                    if len(readers) == 1:
                        wait_s = min(deadline.left_s(), WAIT_SLICE_S)
                        return reader, reader.lease(name, False, wait_s, early)
                    return reader, reader.lease(name, False, 0.0, early)
                except TransferTimeout:
                    num_gone += not self._alive(reader)
                except ReaderClosed:
                    self._check_open()  # else its arena was unlinked
                except SampleLost as error:
                    # What a server that is gone says of the key does not end the wait for one that lives.
                    gone = not self._alive(reader)
                    num_gone += gone
                    last_word = error
                    lost = lost if gone else error
            if lost is None and last_word is not None and num_gone == len(readers):
                lost = last_word
            if lost is None and readers and num_gone == len(readers):
                for reader in readers:  # nobody is left who could publish it; somebody may have before dying
                    try:
                        return reader, self._last_look(reader, name)
                    except SampleLost as error:
                        lost = error
            if lost is not None:
                raise lost
            if deadline.left_s() <= 0:
                raise TransferTimeout(
                    f"sample {key!r} is not ready in any of the {len(readers)} arenas of {self.name} after {deadline}"
                )
            self._check_open()
            time.sleep(pause)
            pause = min(pause * 2, _POLL_S[1])

    def _await_reader(self, instance: str, label: str, deadline: _Deadline) -> ArenaReader:
        give_up = time.monotonic() + ABSENT_S
        pause = _POLL_S[0]
        while True:
            with self._lock:
                reader = self._store.reader(instance, label)
            if reader is not None:
                return reader
            if time.monotonic() >= give_up:
                raise SampleLost(
                    f"{self.name} has no arena of rank {label} of server {instance}: it never opened one or is gone",
                    "missing rank",
                )
            if deadline.left_s() <= 0:
                raise TransferTimeout(f"{self.name} has no arena of rank {label} of server {instance} after {deadline}")
            self._check_open()
            time.sleep(pause)
            pause = min(pause * 2, _POLL_S[1])

    def _lease(self, reader: ArenaReader, name: bytes, deadline: _Deadline, early: bool = False) -> Lease:
        wait_s = 0.0
        while True:
            left_s = deadline.left_s()
            try:
                return reader.lease(name, False, min(left_s, wait_s), early)
            except ReaderClosed:
                self._check_open()
                raise SampleLost(f"sample {name.decode()!r} is gone: closed", "closed") from None
            except TransferTimeout:
                if not self._alive(reader):
                    return self._last_look(reader, name)
                if left_s <= 0:
                    raise TransferTimeout(f"sample {name.decode()!r} is not complete after {deadline}") from None
            self._check_open()
            wait_s = WAIT_SLICE_S

    def _alive(self, reader: ArenaReader) -> bool:
        try:
            return reader.alive()[0]
        except ReaderClosed:
            self._check_open()
            return False

    def _last_look(self, reader: ArenaReader, name: bytes) -> Lease:
        """The producer is gone: what it had not published by now will not come."""
        try:
            return reader.lease(name, False, 0.0)
        except TransferTimeout:
            reason = "closed" if reader.alive()[1] else "producer died"
        except ReaderClosed:
            self._check_open()
            reason = "closed"
        raise SampleLost(f"sample {name.decode()!r} is gone: {reason}", reason)

    def _must_live(self, reader: ArenaReader, name: bytes) -> None:
        """While a sample is copied that still arrives. Raises `SampleLost` if the rest will not come."""
        self._check_open()
        if not self._alive(reader):
            self._last_look(reader, name).release()

    def _check_open(self) -> None:
        check_not_forked(self._pid, "source")
        if self._closed:
            raise TransportUnavailable(f"the source of {self.name} is closed")


def open_source(url: str) -> Source:
    """Opens the consuming side of a store, which need not exist yet. Raises `ConfigError`, `TransportUnavailable`."""
    parsed, transport = resolve(url)
    return Source(str(parsed), transport.open_store(parsed))


class _Deadline:
    """So many seconds from now; prints as what was given."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def __str__(self) -> str:
        return f"{self._timeout_s:g} s"


def _prefetch(source: Source, handles: Iterable[HandleLike], depth: int, options: dict[str, Any]) -> Iterator[Sample]:
    # To a GPU two at a time: while one sample's copies run the other is found, checked and queued behind them.
    num_threads = 1 if str(options.get("device", "cpu")) == "cpu" else min(2, depth)
    for _, future in Prefetcher(lambda handle: source.get(handle, **options), handles, depth, num_threads):
        box = [future]
        del future
        yield _used_here(box.pop())  # bound to no name here: only the loop holds it


def _used_here(future: Future[Sample]) -> Sample:
    sample = future.result()
    sample.used_here()  # not on the stream of the thread that fetched it
    return sample

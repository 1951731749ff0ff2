"""One request's hidden states on their way out."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

MAX_KEY_RID_BYTES = 200  # a key has room for 256 bytes


def make_key(rid: str, number: int) -> str:
    """The sample's key, `rid-number`. Clients choose `rid` freely: one that no key can hold is replaced by its hash."""
    raw = rid.encode("utf-8", "surrogatepass")
    if not rid.isprintable() or len(raw) > MAX_KEY_RID_BYTES:  # a lone surrogate is not printable either
        rid = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return f"{rid}-{number}"


class Sample:
    """Rows `[0, rows)` of a request, by position: an open ticket until `commit` or `fail`, a handle all along.

    The engine's request object holds it. A request that is dropped on a path that no hook sees takes its sample along: the ticket
    goes to `orphans`, and whoever drains them gives the space back. (Not in `__del__` itself: the garbage collector may run
    it in the middle of another call to the sink.)
    """

    __slots__ = ("_orphans", "handle", "key", "rid", "rows", "ticket")

    def __init__(self, rid: str, key: str, rows: int, orphans: deque[Any]) -> None:
        self.rid = rid
        self.key = key
        self.rows = rows
        self.ticket: Any = None
        self.handle: dict[str, Any] | None = None
        self._orphans = orphans

    @property
    def open(self) -> bool:
        """Whether rows may still be written."""
        return self.ticket is not None

    def commit(self) -> None:
        """All rows are queued. Rows never written make the sample fail at its reader, who is told which."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.commit()

    def fail(self, reason: str) -> None:
        """Give the sample up; its reader gets `SampleFailed(reason)`."""
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.abort(reason)

    def __del__(self) -> None:
        if self.ticket is not None:
            self._orphans.append(self.ticket)

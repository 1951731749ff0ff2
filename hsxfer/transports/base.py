"""What a transport is: somewhere to put an arena, and a way to find arenas again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..arena import Arena, ArenaReader
from ..config import StoreUrl


class Store(Protocol):
    """The consuming side of a store: the arenas in it, opened when first asked for."""

    def reader(self, instance: str, label: str) -> ArenaReader | None:
        """The arena of one rank, or None while there is none."""

    def readers(self) -> Iterable[ArenaReader]:
        """Every arena that is there now."""

    def close(self) -> None: ...


class Transport(Protocol):
    scheme: str

    def is_viable(self) -> str | None:
        """None, or the reason why it cannot work here."""

    def open_arena(self, url: StoreUrl, instance: str, label: str) -> Arena:
        """Raises `StoreFull` if the capacity cannot be reserved, `TransportUnavailable` for anything else that stands in the way."""

    def open_store(self, url: StoreUrl) -> Store:
        """Works before any producer is there."""

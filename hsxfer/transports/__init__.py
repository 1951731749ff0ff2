"""URL scheme -> transport."""

from __future__ import annotations

from ..config import StoreUrl, parse_url
from ..errors import TransportUnavailable
from .base import Store, Transport
from .shm import ShmTransport

TRANSPORTS: dict[str, Transport] = {transport.scheme: transport for transport in (ShmTransport(),)}


def resolve(url: str) -> tuple[StoreUrl, Transport]:
    """Raises `ConfigError` for a bad URL, `TransportUnavailable` with the reason if its transport cannot work here."""
    parsed = parse_url(url, tuple(TRANSPORTS))
    transport = TRANSPORTS[parsed.scheme]
    reason = transport.is_viable()
    if reason:
        raise TransportUnavailable(f"{parsed}: {reason}")
    return parsed, transport


__all__ = ["TRANSPORTS", "Store", "Transport", "resolve"]

"""Stores of a test's own, and peers: other processes that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from peer import Peer
from stores import new_store

# Runs that others can repeat, whatever the machine's load.
settings.register_profile("hsxfer", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("hsxfer")


@pytest.fixture
def store() -> Iterator[str]:
    with new_store() as url:
        yield url


@pytest.fixture
def new_peer() -> Iterator[Callable[..., Peer]]:
    peers = []

    def start(*prefix: str) -> Peer:
        peers.append(Peer(*prefix))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def peer(new_peer: Callable[..., Peer]) -> Peer:
    return new_peer()

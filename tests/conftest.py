"""Stores of a test's own, and peers: other processes that end with the test."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from peer import Peer

SHM = Path("/dev/shm")

# Runs that others can repeat, whatever the machine's load.
settings.register_profile("hsxfer", deadline=None, max_examples=40, derandomize=True, database=None)
settings.load_profile("hsxfer")


@contextlib.contextmanager
def new_store() -> Iterator[str]:
    """The URL of a store that nobody else uses; what is left of it is removed."""
    name = f"test-{secrets.token_hex(6)}"
    try:
        yield f"shm://{name}"
    finally:
        shutil.rmtree(store_dir(f"shm://{name}"), ignore_errors=True)


def store_dir(url: str) -> Path:
    return SHM / f"hsxfer-{os.geteuid()}-{url.removeprefix('shm://').partition('?')[0]}"


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

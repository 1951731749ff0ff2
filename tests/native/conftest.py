"""Fixtures of the native core's tests."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile

import pytest
from native_tools import CSRC, HERE, Consumer, Producer, compile_cpp


@pytest.fixture
def path():
    """Where an arena may be made: PATH.arena, PATH.ack."""
    directory = tempfile.mkdtemp(prefix="hsxfer-test-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    yield os.path.join(directory, "i.dp0-pp0-tp0")
    shutil.rmtree(directory)


@pytest.fixture
def arena(path):
    producer = Producer(path)
    yield producer
    producer.close()


@pytest.fixture
def reader(arena):
    with Consumer(arena.path) as consumer:
        yield consumer


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """The core's inner parts, built with tests/native/parts.cpp into a library of their own."""
    library = tmp_path_factory.mktemp("parts") / "libparts.so"
    names = ("parts", "extents", "directory", "rows", "rows_x86")
    sources = [str(HERE / "parts.cpp"), *(str(CSRC / f"{name}.cpp") for name in names[1:])]
    compile_cpp(["-O1", "-shared", "-fPIC", *sources, "-o", str(library)])
    return ctypes.CDLL(str(library))

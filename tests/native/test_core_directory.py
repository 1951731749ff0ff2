"""The key directory: inserted and deleted at random, and looked up by another process all the while."""

import ctypes
import mmap
import os
import random
import struct
import subprocess
import sys
import time

import pytest
from native_tools import HERE

ENTRIES = 64


class Table:
    """Shared memory: 64 entries of 16 bytes, then the version, then a word that ends the reader."""

    def __init__(self, library, path):
        self.library = library
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 4096)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def change(self, changes):
        """[(hash, slot, insert)], seen together."""
        count = len(changes)
        hashes = (ctypes.c_uint64 * count)(*(change[0] for change in changes))
        slots = (ctypes.c_uint32 * count)(*(change[1] for change in changes))
        inserts = (ctypes.c_uint8 * count)(*(change[2] for change in changes))
        self.library.directory_change(*self.place(), hashes, slots, inserts, count)

    def find(self, key_hash):
        found = (ctypes.c_uint32 * ENTRIES)()
        count = self.library.directory_find(*self.place(), ctypes.c_uint64(key_hash), found, ENTRIES)
        return None if count < 0 else sorted(found[:count])

    def place(self):
        return ctypes.c_void_p(self.base), ENTRIES, ctypes.c_void_p(self.base + 16 * ENTRIES)

    def hashes_of(self, slot):
        entries = struct.iter_unpack("<QII", self.memory[: 16 * ENTRIES])
        return [key_hash for key_hash, slot_plus_1, _ in entries if slot_plus_1 == slot + 1]

    def word(self, index):
        return ctypes.c_uint32.from_address(self.base + 16 * ENTRIES + 4 * index)


@pytest.fixture
def table(parts, tmp_path):
    path = tmp_path / "table"
    path.write_bytes(bytes(4096))
    made = Table(parts, path)
    made.path = path
    return made


@pytest.mark.parametrize("seed", range(8))
def test_random_use_against_a_model(table, seed):
    rng = random.Random(seed)
    spread = rng.choice([2, 7, 64, 2**64 - 1])  # few homes: long runs that wrap around the end
    base = rng.randrange(ENTRIES)
    model = {}
    for _ in range(1500):
        changes = []
        for _ in range(rng.randrange(1, 4)):
            if model and (len(model) == ENTRIES // 2 or rng.random() < 0.5):
                slot = rng.choice(list(model))
                changes.append((model.pop(slot), slot, 0))
            else:
                slot = rng.choice([slot for slot in range(40) if slot not in model])
                model[slot] = base + rng.randrange(spread) * rng.choice([1, ENTRIES]) & 2**64 - 1
                changes.append((model[slot], slot, 1))
        table.change(changes)
        for key_hash in {*model.values(), base, base + 1}:
            assert table.find(key_hash) == sorted(slot for slot, value in model.items() if value == key_hash)
    table.change([(value, slot, 0) for slot, value in model.items()])
    assert bytes(table.memory[: 16 * ENTRIES]) == bytes(16 * ENTRIES), "nothing is left behind"


READER = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from test_core_directory import ENTRIES, Table
library = ctypes.CDLL(sys.argv[2])
library.directory_watch.restype = ctypes.c_int64
table = Table(library, sys.argv[3])
unstable = ctypes.c_uint64()
table.word(2).value = 1
looks = library.directory_watch(*table.place(), ctypes.byref(table.word(1)), ctypes.byref(unstable))
print(looks, unstable.value)
"""


def test_a_reader_beside_the_writer(table, parts):
    table.change([(5 + slot % 3, slot, 1) for slot in range(16)])
    command = [sys.executable, "-c", READER, str(HERE), parts._name, str(table.path)]
    reader = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    )
    while table.word(2).value == 0:
        assert reader.poll() is None
    until = time.monotonic() + 1
    while time.monotonic() < until:
        parts.directory_write(*table.place(), ctypes.c_uint64(20001))
        table.change([(entry, slot, 0) for slot in range(16, 32) for entry in table.hashes_of(slot)])
    table.word(1).value = 1
    out, _ = reader.communicate(timeout=20)
    looks, unstable = map(int, out.split())
    assert looks != -1, "a reader missed an entry, or saw one that is not there"
    assert looks > 10_000
    assert unstable < looks / 2


def test_a_version_left_odd_is_not_waited_for(table):
    table.change([(5, 1, 1)])
    table.word(0).value += 1
    assert table.find(5) is None

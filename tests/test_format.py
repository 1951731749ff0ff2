"""docs/format.md against the real thing: bytes at the offsets that it states, digests by a slow model of its formula, the handle's JSON.

The numbers here are written out on purpose: whatever changes them changes the format.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer import pattern, wait_for
from stores import store_dir

import hsxfer
from hsxfer import _native
from hsxfer.layout import place

MASK = 2**64 - 1
FREE, OPEN, SEALED, READY, FAILED, RETIRED = range(6)


def digest(row: bytes) -> int:
    """Section 5, word by word."""
    total = len(row) * 0xD6E8FEB86659FD93
    padded = row + bytes(-len(row) % 8)
    for i in range(len(padded) // 8):
        x = int.from_bytes(padded[8 * i : 8 * i + 8], "little") ^ ((i + 1) * 0x9E3779B97F4A7C15 & MASK)
        total += (x & 0xFFFFFFFF) * (x >> 32) + x
    return total & MASK


def native_digests(rows: np.ndarray) -> list[int]:
    out = (ctypes.c_uint64 * max(1, len(rows)))()
    library = _native.load()
    stride, size = rows.strides[0], rows.shape[1]
    library.check(library.slow.hsx_copy_rows(None, 0, rows.ctypes.data, stride, size, len(rows), out, 8))
    return list(out)[: len(rows)]


GOLDEN = {
    b"": 0x0,
    b"\x00": 0xC3CC068DB5A111D5,
    b"hidden states": 0x51534A36CC3D151C,
    bytes(range(64)): 0x344580DA7DE50122,
    b"\xff" * 6144: 0x60A94137584E9C45,
}


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{len(row)} bytes")
def test_golden_digests(row: bytes) -> None:
    assert digest(row) == GOLDEN[row]
    assert native_digests(np.frombuffer(row, "uint8").reshape(1, -1)) == [GOLDEN[row]]


@given(rows=st.integers(1, 5), size=st.integers(0, 300), lead=st.integers(0, 17), seed=st.integers(0, 2**32))
def test_native_digests_equal_the_model_at_every_length_and_alignment(
    rows: int, size: int, lead: int, seed: int
) -> None:
    table = pattern(seed, (rows, lead + size + 3))[:, lead : lead + size]
    assert native_digests(table) == [digest(row.tobytes()) for row in table]


@given(row=st.binary(min_size=1, max_size=64), where=st.integers(0), change=st.integers(1, 2**32 - 1))
def test_a_change_within_one_aligned_half_of_a_word_changes_the_digest(row: bytes, where: int, change: int) -> None:
    padded = bytearray(row + bytes(-len(row) % 4))
    at = where % (len(padded) // 4) * 4
    struct.pack_into("<I", padded, at, struct.unpack_from("<I", padded, at)[0] ^ change)
    assert digest(bytes(padded)) != digest(row + bytes(-len(row) % 4))


class Files:
    """A store of one arena, read as bytes."""

    def __init__(self, url: str) -> None:
        self.arena_path = next(store_dir(url).glob("*.arena"))
        self.ack_path = self.arena_path.with_suffix(".ack")

    def arena(self, kind: str, offset: int) -> Any:
        return struct.unpack_from("<" + kind, self.arena_path.read_bytes(), offset)[0]

    def ack_bytes(self) -> bytes:
        """By another process: closing the file in this one would drop the locks that hold leases and liveness."""
        return subprocess.run(["cat", str(self.ack_path)], check=True, capture_output=True).stdout

    def ack(self, kind: str, offset: int) -> Any:
        return struct.unpack_from("<" + kind, self.ack_bytes(), offset)[0]

    def slot(self, index: int = 0) -> dict[str, int]:
        names = (
            *("magic", "state", "generation", "sequence", "extent_offset", "extent_bytes", "key_hash"),
            *("key_bytes", "consumers", "head_bytes", "tail_bytes", "fate", "reserved"),
        )
        at = self.arena("Q", 32) + 64 * index
        return dict(zip(names, struct.unpack_from("<2I5Q2H2I2H", self.arena_path.read_bytes(), at), strict=True))

    def extent(self, index: int = 0) -> bytes:
        slot = self.slot(index)
        start = self.arena("Q", 64) + slot["extent_offset"]
        return self.arena_path.read_bytes()[start : start + slot["extent_bytes"]]


@pytest.fixture
def sink(store: str) -> Iterator[hsxfer.Sink]:
    with hsxfer.open_sink(
        f"{store}?capacity=1MiB&slots=5&unread_ttl_s=77", instance="inst", model="m", layers=[2, 5], convention="c"
    ) as sink:
        yield sink


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & MASK
    return value


def test_the_store(store: str, sink: hsxfer.Sink) -> None:
    directory = store_dir(store)
    assert (directory.stat().st_mode & 0o7777, directory.stat().st_uid) == (0o700, os.geteuid())
    assert sorted(path.name for path in directory.iterdir()) == ["inst.dp0-pp0-tp0.ack", "inst.dp0-pp0-tp0.arena"]
    for path in directory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_blocks * 512 >= path.stat().st_size, "reserved as a whole"


def test_the_arena_header(store: str, sink: hsxfer.Sink) -> None:
    files = Files(store)
    data = files.arena_path.read_bytes()
    assert data[:8] == b"HSXARENA"
    version, header_bytes, file_bytes, capacity = struct.unpack_from("<IIQQ", data, 8)
    assert (version, header_bytes, file_bytes, capacity) == (0, 4096, len(data), 1 << 20)
    slots_at, num_slots, slot_bytes, directory_at, num_entries, entry_bytes = struct.unpack_from("<QIIQII", data, 32)
    assert (num_slots, slot_bytes, num_entries, entry_bytes) == (5, 64, 16, 16)
    region_at, region_bytes, created_us, ttl_us = struct.unpack_from("<4Q", data, 64)
    assert region_at % 4096 == 0
    assert region_bytes >= (1 << 20) + (1 << 20) // 32 + (1 << 20)
    assert 4096 <= slots_at <= slots_at + 5 * 64 <= directory_at <= directory_at + 16 * 16 <= region_at
    assert region_at + region_bytes == file_bytes
    assert abs(created_us / 1e6 - time.time()) < 60
    assert ttl_us == 77_000_000
    assert files.arena("I", 132) == 0, "not closed"
    for start, stop in ((96, 128), (144, 192), (196, 4096)):
        assert not any(data[start:stop]), "reserved bytes are zero"


def test_the_acknowledgement_file(store: str, sink: hsxfer.Sink) -> None:
    data = Files(store).ack_bytes()
    assert data[:8] == b"HSXACK00"
    assert struct.unpack_from("<II", data, 8) == (0, 5)
    assert len(data) >= 4096 + 8 * 5


def test_a_sample_from_begin_to_its_end(store: str, sink: hsxfer.Sink) -> None:
    files = Files(store)
    rows = pattern(1, (6, 10), "int16")
    ids = [5, 6, 7, 8, 9, 10]
    ticket = sink.begin("clé", {"x": ((6, 10), "int16")}, token_ids=ids, meta={"a": [1]}, rid="r", consumers=2)
    slot = files.slot()
    assert (slot["magic"], slot["state"], slot["generation"]) == (0x31585348, OPEN, 1)
    assert (slot["key_hash"], slot["key_bytes"], slot["consumers"]) == (fnv1a("clé".encode()), 4, 2)
    assert slot["extent_offset"] % 256 == 0
    assert files.ack("Q", 4096) == 1 << 32

    ticket.write("x", 0, rows)
    ticket.commit()
    sink.flush()
    slot, extent = files.slot(), files.extent()
    assert (slot["state"], slot["sequence"], slot["fate"], slot["reserved"]) == (READY, 1, 0, 0)
    assert files.arena("Q", 136) == 1, "sequence of the newest"
    tail_at, tail_capacity, data_at, data_bytes, watermarks_at, num_watermarks = struct.unpack_from("<IIQQQI", extent)
    assert (watermarks_at, num_watermarks) == (0, 0)
    assert data_at % 256 == 0
    assert data_at + data_bytes <= len(extent)
    assert slot["tail_bytes"] <= tail_capacity
    assert extent[64:68] == "clé".encode()
    head = json.loads(extent[68 : 68 + slot["head_bytes"]])
    assert head == {
        "handle": ticket.handle.to_dict(),
        "token_ids": True,
        "meta": {"a": [1]},
        "tensors": {
            "x": {"offset": 0, "row_bytes": 20, "rows": 6, "planes": 1, "digests": 512},
            "token_ids": {"offset": 256, "row_bytes": 8, "rows": 6, "planes": 1, "digests": 512 + 48},
        },
    }
    assert json.loads(extent[tail_at : tail_at + slot["tail_bytes"]] or b"{}") == {}
    data = extent[data_at : data_at + data_bytes]
    assert data[:120] == rows.tobytes()
    assert data[256:304] == np.array(ids, "<i8").tobytes()
    assert list(struct.unpack_from("<6Q", data, 512)) == [digest(row.tobytes()) for row in rows]
    assert list(struct.unpack_from("<6Q", data, 560)) == [digest(struct.pack("<q", token)) for token in ids]

    directory = [
        struct.unpack_from("<QII", files.arena_path.read_bytes(), files.arena("Q", 48) + 16 * n) for n in range(16)
    ]
    assert directory[fnv1a("clé".encode()) % 16] == (fnv1a("clé".encode()), 1, 0)
    assert sum(entry[1] > 0 for entry in directory) == 1
    assert files.arena("I", 192) % 2 == 0

    source = hsxfer.open_source(store)
    counted = files.arena("I", 128)
    for acknowledged in (1, 2):
        source.get("clé", framework="numpy").release()
        assert files.ack("Q", 4096) == 1 << 32 | acknowledged
    wait_for(lambda: files.slot()["state"] == RETIRED, "retired", 5)
    assert files.slot()["fate"] == 1
    assert files.slot()["key_hash"] == slot["key_hash"], "a late reader learns the fate"
    assert files.arena("I", 128) != counted
    assert files.ack("I", 64) > 0, "releases are counted"
    sink.put({"x": rows}, "next")
    assert files.slot(1)["generation"] == 1, "slots never used are taken before retired ones"


def test_a_failed_sample_keeps_its_description_only(store: str, sink: hsxfer.Sink) -> None:
    files = Files(store)
    ticket = sink.begin("a", {"x": ((1000, 10), "int16")})
    ticket.write("x", 64, pattern(1, (36, 10), "int16"))
    ticket.write("x", 500, pattern(1, (500, 10), "int16"))
    before = files.slot()["extent_bytes"]
    ticket.commit()
    sink.flush()
    slot, extent = files.slot(), files.extent()
    assert slot["state"] == FAILED
    assert slot["extent_bytes"] < before - 20_000
    tail_at = struct.unpack_from("<I", extent)[0]
    tail = json.loads(extent[tail_at : tail_at + slot["tail_bytes"]])
    assert tail == {"failed": "rows were never written", "missing": {"x": [[0, 64], [100, 500]]}}


def test_the_tail_of_a_part_under_shard(store: str) -> None:
    ranks = [hsxfer.Rank(tp=(n, 2)) for n in range(2)]
    sinks = [hsxfer.open_sink(f"{store}?capacity=1MiB", rank, "shard", instance="i") for rank in ranks]
    rows = pattern(1, (100, 4))
    for sink in sinks:
        ticket = sink.begin("a", {"x": ((100, 4), "uint8")})
        ticket.write("x", 40, rows[40:])
        ticket.write("x", 0, rows[:40])
        ticket.commit()
        sink.flush()
    for tp, pieces in enumerate([[[1, 40, 70, 0], [2, 0, 20, 30]], [[1, 70, 100, 0], [2, 20, 40, 30]]]):
        files = Files(store)
        files.arena_path = store_dir(store) / f"i.dp0-pp0-tp{tp}.arena"
        slot, extent = files.slot(), files.extent()
        tail_at, _, data_at = struct.unpack_from("<IIQ", extent)
        assert json.loads(extent[tail_at : tail_at + slot["tail_bytes"]]) == {"pieces": {"x": pieces}}
        head = json.loads(extent[65 : 65 + slot["head_bytes"]])
        assert head["handle"]["ranks"] == ["dp0-pp0-tp0", "dp0-pp0-tp1"]
        assert 50 <= head["tensors"]["x"]["rows"] <= 100
        for _, first, last, local in pieces:
            at = data_at + 4 * local
            assert extent[at : at + 4 * (last - first)] == rows[first:last].tobytes()
    for sink in sinks:
        sink.close()


def test_closing_marks_the_arena_and_leaves_it_for_what_is_unread(store: str, sink: hsxfer.Sink) -> None:
    sink.put({"x": pattern(1, (4, 4))}, "a")
    files = Files(store)
    sink.close()
    assert files.arena("I", 132) == 1
    assert files.slot()["state"] == READY


def test_closing_with_nothing_unread_leaves_nothing(store: str, sink: hsxfer.Sink) -> None:
    sink.close()
    assert not store_dir(store).exists()


def test_the_handle(store: str, sink: hsxfer.Sink) -> None:
    handle = sink.put({"x": pattern(1, (2, 3), "bfloat16")}, "k", token_ids=[1, 2], rid="r")
    assert handle.to_json() == (
        '{"hsxfer":0,"store":"' + store + '","instance":"inst","key":"k","rid":"r","rows":[0,2],'
        '"tensors":{"x":{"dtype":"bfloat16","shape":[2,3]}},"layers":[2,5],"convention":"c","policy":"leader",'
        '"ranks":["dp0-pp0-tp0"],"consumers":1,"token_hash":"96a3cf72d606b6a4","model":"m"}'
    )


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=5), st.booleans())
def test_a_layout_overlaps_nothing_and_aligns_every_tensor(shapes: list[tuple[int, int]], digests: bool) -> None:
    rows = shapes[0][0]
    specs = {f"t{n}": hsxfer.TensorSpec("uint8", (rows, width)) for n, (_, width) in enumerate(shapes)}
    layout = place(specs, rows, digests)
    spans = [(at.offset, at.offset + rows * at.row_bytes) for at in layout.placements.values()]
    assert all(start % 256 == 0 for start, _ in spans)
    spans += [(at.digests, at.digests + 8 * rows) for at in layout.placements.values() if at.digests is not None]
    assert len(spans) == len(specs) * (2 if digests else 1)
    spans.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.data_bytes
    assert layout.payload_bytes == sum(rows * width for _, width in shapes)


def test_format_md_names_the_magics_of_the_files() -> None:
    text = (Path(__file__).parent.parent / "docs/format.md").read_text()
    for word in ("HSXARENA", "HSXACK00", "HSX1", "0x9E3779B97F4A7C15", "0xD6E8FEB86659FD93"):
        assert f"`{word}`" in text or word in text

"""Bytes that change in the arena are found, and named, where something is checked."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from peer import pattern, wait_for
from stores import store_dir

import hsxfer


def damage(arena: Path, around: bytes) -> None:
    """Flips one bit of the first byte of `around`, which is once in the file."""
    data = arena.read_bytes()
    assert data.count(around) == 1
    with arena.open("r+b", buffering=0) as file:
        file.seek(data.index(around))
        file.write(bytes([around[0] ^ 1]))


def arena_of(url: str) -> Path:
    (path,) = store_dir(url).glob("*.arena")
    return path


def test_a_damaged_row_is_named_by_its_position(store: str) -> None:
    rows = pattern(1, (100, 40))
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"good": pattern(2, (100, 4)), "x": rows}, token_ids=range(100), consumers=99)
        sink.flush()
        damage(arena_of(store), rows[37].tobytes())
        for options in (
            {"copy": True},
            {"verify": True},
            {"rows": slice(30, 40), "copy": True},
            {"names": ["x"], "verify": True},
        ):
            with pytest.raises(hsxfer.IntegrityError, match="row 37 of 'x'"):
                source.get(handle, framework="numpy", **options)
        for options in (
            {"rows": slice(0, 37), "copy": True},
            {"rows": slice(38, 100), "verify": True},
            {"names": ["good"], "verify": True},
        ):
            source.get(handle, framework="numpy", **options).release()
        for options in ({}, {"copy": True, "verify": False}):
            with source.get(handle, framework="numpy", **options) as sample:
                assert (sample["x"] != rows).sum() == 1


def test_damaged_token_ids_are_named(store: str) -> None:
    ids = list(range(10**6, 10**6 + 10))
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": pattern(1, (10, 4))}, token_ids=ids)
        sink.flush()
        damage(arena_of(store), np.array(ids[4:6]).tobytes())
        with pytest.raises(hsxfer.IntegrityError, match="row 4 of 'token_ids'"):
            source.get(handle, verify=True)


def test_a_damaged_shard_is_named_by_the_samples_row(store: str) -> None:
    rows = pattern(1, (100, 16))
    sinks = [hsxfer.open_sink(f"{store}?capacity=1MiB", hsxfer.Rank(tp=(n, 2)), "shard", instance="i") for n in (0, 1)]
    (handle,) = {sink.put({"x": rows}, "k", consumers=9) for sink in sinks}
    for sink in sinks:
        sink.flush()
    damage(store_dir(store) / "i.dp0-pp0-tp1.arena", rows[71].tobytes())
    with hsxfer.open_source(store) as source:
        with pytest.raises(hsxfer.IntegrityError, match="row 71 of 'x'"):
            source.get(handle)
        source.get(handle, rows=slice(0, 71)).release()
    for sink in sinks:
        sink.close()


def test_an_integrity_error_keeps_no_memory(store: str) -> None:
    rows = pattern(1, (100, 40))
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": rows})
        sink.flush()
        damage(arena_of(store), rows[3].tobytes())
        with pytest.raises(hsxfer.IntegrityError) as kept:
            source.get(handle, verify=True)
        wait_for(lambda: sink.stats()["used_bytes"] == 0, "the space is back while the error is kept", 5)
        assert kept.value


def test_without_digests_nothing_is_checked_and_nothing_is_paid(store: str) -> None:
    rows = pattern(1, (100, 40))
    with hsxfer.open_sink(store + "?capacity=1MiB&digest=off") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": rows})
        sink.flush()
        damage(arena_of(store), rows[3].tobytes())
        with source.get(handle, verify=True, copy=True, framework="numpy") as sample:
            assert (sample["x"] != rows).sum() == 1


@pytest.mark.parametrize("name", ["x.arena", "x.y.arena", "i.dp0-pp0-tp1.arena"])
@pytest.mark.parametrize("content", [b"", b"not an arena", bytes(8192), b"HSXARENA" + bytes(8184)], ids=len)
def test_a_file_that_is_no_arena_disturbs_nobody(store: str, name: str, content: bytes) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        (store_dir(store) / name).write_bytes(content)
        with hsxfer.open_source(store) as source, hsxfer.open_sink(store + "?capacity=1MiB") as other:
            for key, by in (("a", sink), ("b", other)):
                by.put({"x": pattern(1, (3, 3))}, key)
                source.get(key, timeout_s=5).release()
        assert (store_dir(store) / name).read_bytes() == content, "not ours to remove"
        os.unlink(store_dir(store) / name)

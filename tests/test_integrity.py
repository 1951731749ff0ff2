"""Bytes that change in the arena are found, and named, where something is checked."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from peer import pattern, wait_for
from stores import store_dir

import hsxfer
from hsxfer.sample import Part


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


def test_a_failure_is_a_failure_whatever_the_reason(store: str) -> None:
    with hsxfer.open_sink(f"{store}?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        for number, reason in enumerate((None, "", 5)):
            sink.begin(f"k{number}", {"x": ((4, 4), "float32")}).abort(reason)  # type: ignore[arg-type]
            with pytest.raises(hsxfer.SampleFailed):
                source.get(f"k{number}")


def test_a_ticket_of_another_sink_is_refused(store: str) -> None:
    with hsxfer.open_sink(f"{store}?capacity=1MiB") as one, hsxfer.open_sink(f"{store}?capacity=1MiB") as other:
        ticket = one.begin("k", {"x": ((4, 4), "float32")})
        with pytest.raises(hsxfer.ConfigError, match="another sink's"):
            other.write_many([(ticket, "x", 0, np.ones((4, 4), "float32"))])
        for start in ("a", None, 0.0, -1, 5):
            with pytest.raises(hsxfer.ConfigError):
                ticket.write("x", start, np.ones((4, 4), "float32"))  # type: ignore[arg-type]


def test_rows_that_could_not_be_queued_fail_their_sample(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hsxfer.open_sink(f"{store}?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        tickets = [sink.begin(f"k{n}", {"x": ((4, 4), "float32")}) for n in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sink._arena, "submit_copies", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                sink.write_many([(ticket, "x", 0, np.ones((4, 4), "float32")) for ticket in tickets])
            with pytest.raises(KeyboardInterrupt):
                sink.put({"x": np.ones((4, 4), "float32")}, "put")
        for ticket in tickets:
            ticket.commit()
        for key in ("k0", "k1", "put"):
            with pytest.raises(hsxfer.SampleFailed):
                source.get(key)
        sink.flush()
        assert sink.stats()["used_bytes"] == 0


def test_an_acknowledgement_is_of_the_sample_that_was_leased(store: str) -> None:
    with hsxfer.open_sink(f"{store}?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        sink.put({"x": np.full((4, 4), 1.0)}, "k")
        (reader,) = source._store.readers()
        first = reader.lease(b"k", False, 5.0)
        source.get("k").release()
        sink.put({"x": np.full((4, 4), 2.0)}, "k")
        with pytest.raises(hsxfer.SampleLost, match="consumed"):
            first.acknowledge()
        with source.get("k", framework="numpy") as sample:
            assert (sample["x"] == 2.0).all(), "the newer sample's acknowledgement was not touched"


def test_a_head_that_lies_about_its_rows_leads_nowhere(store: str) -> None:
    with hsxfer.open_sink(f"{store}?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        honest = sink.put({"x": np.ones((4, 4), "float32")}, "good")
        (reader,) = source._store.readers()
        part = Part(reader.lease(b"good", False, 5.0), honest)
        for change in ({"row_bytes": 64}, {"row_bytes": None}, {"offset": "x"}, {"encoding": "zip"}, {"marks": 3}):
            part._places = {"x": {**part._places["x"], **change}}
            with pytest.raises(hsxfer.HandleError):
                part.place("x")
            part = Part(reader.lease(b"good", False, 5.0), honest)

"""Room: what happens when there is too little of it, and that it always comes back."""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer import Peer, fetch, pattern, source_of, told, wait_for
from stores import store_dir

import hsxfer

LIVELY_S = 5.0
BIG = {"x": ((600, 1000), "uint8")}  # more than half of a MiB


def big(seed: int) -> np.ndarray:
    return pattern(seed, (600, 1000))


def used(sink: hsxfer.Sink) -> int:
    return sink.stats()["used_bytes"]


def comes_back(sink: hsxfer.Sink) -> None:
    wait_for(lambda: used(sink) == 0, "the space is back", LIVELY_S)


@pytest.fixture
def source(store: str) -> Iterator[hsxfer.Source]:
    with hsxfer.open_source(store) as source:
        yield source


# ---- a full arena is the policy's business -----------------------------------------------------------------------------


def test_block_waits_for_a_consumer(store: str, peer: Peer) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&block_s=60") as sink:
        first = sink.put({"x": big(1)}, "a")
        second: list[hsxfer.Handle] = []
        thread = threading.Thread(target=lambda: second.append(sink.put({"x": big(2)}, "b")))
        thread.start()
        peer(
            lambda my, url, handle: setattr(my, "held", source_of(my, url).get(handle, framework="numpy")), store, first
        )
        assert thread.is_alive(), "a sample that is read still has its memory"
        peer(lambda my: my.held.release())
        thread.join(LIVELY_S)
        assert peer(fetch, store, second[0], framework="numpy")["x"] == told(big(2))
        comes_back(sink)


def test_block_s_runs_out(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&block_s=0.3") as sink:
        sink.put({"x": big(1)})
        started = time.monotonic()
        with pytest.raises(hsxfer.StoreFull) as caught:
            sink.put({"x": big(2)}, "k")
        assert 0.3 <= time.monotonic() - started < LIVELY_S
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (600_000, (1 << 20) - 600_000)
        assert caught.value.capacity_bytes == 1 << 20
        with pytest.raises(hsxfer.SampleFailed, match="600000 bytes of payload do not fit"):
            source.get("k", timeout_s=LIVELY_S)


def test_error_raises_at_once(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&on_full=error") as sink:
        first = sink.put({"x": big(1)})
        with pytest.raises(hsxfer.StoreFull):
            sink.put({"x": big(2)}, "k")
        with pytest.raises(hsxfer.SampleFailed, match="do not fit"):
            source.get("k", timeout_s=LIVELY_S)
        source.get(first).release()
        sink.put({"x": big(3)})
        assert sink.stats()["num_refused"] == 1


def test_drop_returns_a_handle_whose_consumer_is_told(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&on_full=drop") as sink:
        sink.put({"x": big(1)})
        dropped = sink.put({"x": big(2)}, token_ids=range(600))
        ticket = sink.begin("t", BIG)
        ticket.write("x", 0, big(3))
        for handle in (dropped, ticket.commit()):
            with pytest.raises(hsxfer.SampleFailed, match="do not fit"):
                source.get(handle, timeout_s=LIVELY_S)
        assert sink.stats()["num_dropped"] == 2
        assert used(sink) == 600_000


def test_begin_that_may_not_wait_leaves_no_trace(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        first = sink.put({"x": big(1)})
        with pytest.raises(hsxfer.StoreFull):
            sink.begin("k", BIG, block_s=0)
        with pytest.raises(hsxfer.TransferTimeout):
            source.get("k", timeout_s=0)
        source.get(first).release()
        comes_back(sink)
        ticket = sink.begin("k", BIG, block_s=0)
        ticket.write("x", 0, big(2))
        ticket.commit()
        source.get("k").release()


@pytest.mark.parametrize("policy", ["block", "error", "drop"])
def test_what_can_never_fit_does_not_wait(store: str, source: hsxfer.Source, policy: str) -> None:
    """More payload than the capacity; rows of one byte, whose digests are eight times as long."""
    with hsxfer.open_sink(f"{store}?capacity=1MiB&block_s=60&on_full={policy}") as sink:
        for key, shape, sizes in (("long", (1 << 21, 1), "2097152"), ("narrow", (900_000, 1), "8100[0-9]*")):
            started = time.monotonic()
            if policy == "drop":
                sink.begin(key, {"x": (shape, "uint8")})
            else:
                with pytest.raises(hsxfer.StoreFull, match=sizes) as caught:
                    sink.begin(key, {"x": (shape, "uint8")})
                assert caught.value.needed_bytes > caught.value.capacity_bytes, "waiting will not help"
            assert time.monotonic() - started < LIVELY_S
            with pytest.raises(hsxfer.SampleFailed, match=sizes):
                source.get(key, timeout_s=LIVELY_S)


def test_without_digests_narrow_rows_fit(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(f"{store}?capacity=1MiB&digest=off") as sink:
        rows = pattern(1, (1_000_000, 1))
        with source.get(sink.put({"x": rows}), framework="numpy") as sample:
            assert (sample["x"] == rows).all()


def test_when_every_slot_is_taken(store: str, source: hsxfer.Source, caplog: pytest.LogCaptureFixture) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&slots=3&on_full=drop") as sink:
        handles = [sink.put({"x": pattern(n, (2, 2))}) for n in range(3)]
        dropped = sink.put({"x": pattern(9, (2, 2))})
        assert f"the consumer of {dropped.key!r}" in caplog.text, "nobody else can be told"
        for number, handle in enumerate(handles):
            with source.get(handle, framework="numpy") as sample:
                assert (sample["x"] == pattern(number, (2, 2))).all()
        sink.put({"x": pattern(1, (2, 2))})


def test_failures_make_room_for_newer_ones(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&slots=3") as sink:
        for number in range(50):
            sink.reject(f"k{number}", BIG, "no")
            sink.flush()
        with pytest.raises(hsxfer.SampleFailed):
            source.get("k49", timeout_s=LIVELY_S)
        with pytest.raises((hsxfer.SampleLost, hsxfer.TransferTimeout)):
            source.get("k0", timeout_s=0)
        source.get(sink.put({"x": big(1)})).release()


def test_a_store_that_nobody_reads_says_so_once(store: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hsxfer"):
        with hsxfer.open_sink(store + "?capacity=1MiB&on_full=drop") as sink:
            for seed in range(4):
                sink.put({"x": big(seed)})
                sink.flush()
            messages = [record.getMessage() for record in caplog.records]
            assert messages == [f"{store} is full (600000 of 1048576 bytes, 1 samples unread) and nobody reads it"]


# ---- no room on the file system -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", ["200TiB", "256TiB"])
def test_a_capacity_that_the_file_system_does_not_have(store: str, capacity: str) -> None:
    with pytest.raises(hsxfer.StoreFull) as caught:
        hsxfer.open_sink(f"{store}?capacity={capacity}")
    assert caught.value.needed_bytes >= 200 << 40
    assert not store_dir(store).exists() or not list(store_dir(store).iterdir())


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(directory: Path) -> int:
    """Takes all that is left of the file system."""
    written = 0
    with (directory / "other").open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(4096))
        except OSError:
            return written


def test_a_tiny_file_system_refuses_at_open_and_keeps_nothing(tiny: Path, store: str) -> None:
    free = os.statvfs(tiny).f_bavail
    with pytest.raises(hsxfer.StoreFull, match="bytes"):
        hsxfer.open_sink(f"{store}?capacity=4MiB&dir={tiny}")
    assert list(tiny.rglob("*.a*")) == []
    assert os.statvfs(tiny).f_bavail >= free - 1, "a directory at most"


def test_what_was_reserved_can_be_written_when_the_file_system_is_full(tiny: Path, store: str) -> None:
    """In a process of its own, which a SIGBUS would end."""

    url = f"{store}?capacity=500kB&slots=64&dir={tiny}"
    with hsxfer.open_sink(url):
        assert fill(tiny) > 0
        with pytest.raises(hsxfer.StoreFull):
            hsxfer.open_sink(url)
    (tiny / "other").unlink()
    peer = Peer()
    try:
        peer(lambda my, url: setattr(my, "sink", hsxfer.open_sink(url)), url)
        assert fill(tiny) > 0
        assert os.statvfs(tiny).f_bavail == 0

        def put_all(my: Any) -> list[hsxfer.Handle]:
            handles = [my.sink.put({"x": pattern(seed, (100, 1000))}) for seed in range(5)]
            my.sink.flush()
            return handles

        source = hsxfer.open_source(url)
        for seed, handle in enumerate(peer(put_all)):
            with source.get(handle, framework="numpy", verify=True) as sample:
                assert (sample["x"] == pattern(seed, (100, 1000))).all()
        source.close()
    finally:
        peer.close()


# ---- time -----------------------------------------------------------------------------------------------------------------


def test_unread_samples_expire(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&unread_ttl_s=0.2") as sink:
        handle = sink.put({"x": big(1)})
        comes_back(sink)
        with pytest.raises(hsxfer.SampleLost) as caught:
            source.get(handle)
        assert caught.value.reason == "expired"
        assert sink.stats()["num_expired"] == 1


def test_what_is_held_does_not_expire(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB&unread_ttl_s=0.2") as sink:
        sample = source.get(sink.put({"x": big(1)}), ack=False, framework="numpy")
        other = sink.put({"x": pattern(2, (10, 10))})
        wait_for(lambda: sink.stats()["num_expired"] == 1, "the other one expired", LIVELY_S)
        assert (sample["x"] == big(1)).all()
        assert used(sink) == 600_000
        sample.release()
        comes_back(sink)
        with pytest.raises(hsxfer.SampleLost):
            source.get(other)


# ---- lifetime -----------------------------------------------------------------------------------------------------------


def traffic(sink: hsxfer.Sink, source: hsxfer.Source) -> None:
    """Enough to have written over everything that was free."""
    for seed in range(100, 112):
        source.get(sink.put({"x": pattern(seed, (300, 1000))})).release()


@pytest.mark.parametrize("framework", ["torch", "numpy", "memoryview"])
def test_a_view_keeps_its_memory(store: str, source: hsxfer.Source, framework: str) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        with source.get(sink.put({"x": big(1)}), framework=framework) as sample:
            view = sample["x"][100:]
        del sample
        traffic(sink, source)
        assert used(sink) == 600_000
        assert (
            bytes(view) == big(1)[100:].tobytes()
            if framework == "memoryview"
            else (np.asarray(view) == big(1)[100:]).all()
        )
        del view
        comes_back(sink)


def test_a_view_outlives_its_source_and_its_sink(store: str) -> None:
    sink = hsxfer.open_sink(store + "?capacity=1MiB")
    source = hsxfer.open_source(store)
    sample = source.get(sink.put({"x": big(1), "y": big(2)[:, :10]}), framework="numpy")
    view = sample["x"][::7]
    source.close()
    with hsxfer.open_source(store) as other:
        traffic(sink, other)
    assert used(sink) > 0
    sink.close()
    assert (view == big(1)[::7]).all()
    assert (sample["y"] == big(2)[:, :10]).all(), "an open sample outlives them too"
    mapped = Path("/proc/self/maps").read_text().count(store.removeprefix("shm://"))
    assert mapped > 0
    del view, sample
    assert Path("/proc/self/maps").read_text().count(store.removeprefix("shm://")) == 0, "nothing is mapped any more"


def test_dropping_a_sample_releases_it(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        sample = source.get(sink.put({"x": big(1)}))
        assert sample["x"].shape == (600, 1000)
        gc.disable()  # without a cycle to be collected
        try:
            del sample
            comes_back(sink)
        finally:
            gc.enable()


def test_an_exception_releases_the_sample(store: str, source: hsxfer.Source) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        with pytest.raises(ZeroDivisionError) as kept, source.get(sink.put({"x": big(1)})) as sample:
            sample["x"][0, 0].item() / 0
        comes_back(sink)
        assert kept.value


@pytest.mark.parametrize("how", ["close", "kill"])
def test_the_end_of_a_consumer_releases_what_it_held(store: str, peer: Peer, how: str) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        peer(
            lambda my, url, handle: setattr(my, "held", source_of(my, url).get(handle, framework="numpy")),
            store,
            sink.put({"x": big(1)}),
        )
        assert used(sink) == 600_000
        getattr(peer, how)()
        comes_back(sink)


def test_thousands_of_samples_of_any_size_leave_nothing(store: str, source: hsxfer.Source) -> None:
    """Held for as long as chance wants, checked when they go; a full arena is relieved by letting the oldest go."""
    dice = random.Random(7)
    held: list[tuple[hsxfer.Sample, int, tuple[int, int]]] = []

    def let_go(index: int) -> None:
        sample, seed, shape = held.pop(index)
        assert (sample["x"] == pattern(seed, shape)).all(), f"sample {seed}"
        sample.release()

    with hsxfer.open_sink(store + "?capacity=1MiB&on_full=error") as sink:
        num_full = 0
        for seed in range(2500):
            shape = (dice.choice((1, 3, 50)) * dice.randint(0, 20), dice.choice((1, 16, 200)))
            while True:
                try:
                    handle = sink.put({"x": pattern(seed, shape)}, f"{seed}-{num_full}")
                    break
                except hsxfer.StoreFull:
                    num_full += 1
                    let_go(0)
            held.append((source.get(handle, framework="numpy"), seed, shape))
            while held and dice.random() < 0.5:
                let_go(dice.randrange(len(held)))
        while held:
            let_go(0)
        stats = wait_for(lambda: (stats := sink.stats())["used_bytes"] == 0 and stats, "all is back", LIVELY_S)
        assert stats["num_consumed"] == 2500
        assert stats["num_refused"] == num_full > 0
        assert stats["num_unread"] == 0
        assert stats["num_live"] <= num_full, "only failures are left, and no more than there were"
        source.get(sink.put({"x": pattern(1, (1000, 1000))})).release()

"""Either side may be killed, stopped or closed at any instant: the other gets its memory back, or a typed error within 5 s, and never a
torn sample."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer import Peer, fetch, pattern, source_of, told, wait_for
from stores import store_dir

import hsxfer
from hsxfer.transports.shm import ORPHAN_S

LIVELY_S = 5.0
SHAPE = (300, 64)
CHUNK = 50


def opens(my: Any, url: str, **options: Any) -> str:
    """In the peer: a sink."""
    my.sink = hsxfer.open_sink(url, **options)
    return my.sink.instance


def puts(my: Any, seed: int, key: str | None = None, **options: Any) -> hsxfer.Handle:
    handle = my.sink.put({"x": pattern(seed, (300, 64))}, key, **options)
    my.sink.flush()
    return handle


def holds(my: Any, url: str, handle: Any, **options: Any) -> Any:
    """In the peer: a sample that stays open."""
    my.held = source_of(my, url).get(handle, framework="numpy", **options)
    return told(my.held["x"])


def comes_back(sink: hsxfer.Sink) -> None:
    wait_for(lambda: sink.stats()["used_bytes"] == 0, "the space is back", LIVELY_S)


@pytest.fixture(params=["one PID namespace", "two PID namespaces"])
def apart(request: pytest.FixtureRequest, new_peer: Callable[..., Peer]) -> Callable[[], Peer]:
    """Starts peers, each in a PID namespace of its own if the machine lets us."""
    if request.param == "one PID namespace":
        return new_peer
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no PID namespaces here: {tried.stderr.strip()}")
    return lambda: new_peer(*unshare)


# ---- the consumer dies ----------------------------------------------------------------------------------------------------


def test_a_consumer_killed_while_it_reads(store: str, apart: Callable[[], Peer]) -> None:
    producer, victim, other = apart(), apart(), apart()
    producer(opens, store + "?capacity=1MiB")
    first, second, both = producer(puts, 1), producer(puts, 2), producer(puts, 3, consumers=2)
    victim(holds, store, first)
    assert producer(lambda my: my.sink.stats()["used_bytes"]) == 3 * 300 * 64
    other(holds, store, both)
    victim.kill()
    wait_for(lambda: producer(lambda my: my.sink.stats()["used_bytes"]) == 2 * 300 * 64, "its memory is back", LIVELY_S)
    with pytest.raises(hsxfer.SampleLost, match="consumed"):
        other(fetch, store, first, framework="numpy")
    assert other(fetch, store, second, framework="numpy")["x"] == told(pattern(2, SHAPE))
    assert other(lambda my: told(my.held["x"])) == told(pattern(3, SHAPE))
    assert other(fetch, store, both, framework="numpy")["x"] == told(pattern(3, SHAPE))


def test_a_consumer_killed_before_it_acknowledged(store: str, new_peer: Callable[..., Peer]) -> None:
    victim, other = new_peer(), new_peer()
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        handle = sink.put({"x": pattern(1, SHAPE)})
        victim(holds, store, handle, ack=False)
        victim.kill()
        assert other(fetch, store, handle, framework="numpy")["x"] == told(pattern(1, SHAPE))
        comes_back(sink)


def test_consumers_killed_one_after_the_other_while_samples_flow(store: str, peer: Peer) -> None:
    """Children forked from one peer, killed at any moment; what they had is back, and the last one gets everything right."""

    def fork(my: Any, url: str) -> int:
        child = os.fork()
        if child == 0:
            source, number = hsxfer.open_source(url), 0
            while True:
                try:
                    sample = source.get(f"k{number}", framework="numpy", timeout_s=0.2)
                    assert (sample["x"] == sample["x"][0, 0]).all()
                except hsxfer.HsxferError:
                    pass
                number += 1
        return child

    def reap(my: Any, child: int) -> None:
        os.kill(child, 9)
        os.waitpid(child, 0)

    dice = random.Random(3)
    with hsxfer.open_sink(store + "?capacity=256KiB&on_full=error") as sink:
        number = 0
        for _ in range(20):
            child = peer(fork, store)
            end = time.monotonic() + dice.random() * 0.05
            while time.monotonic() < end:
                with contextlib.suppress(hsxfer.StoreFull):
                    sink.put({"x": np.full((50, 64), number % 251, "uint8")}, f"k{number}")
                number += 1
            peer(reap, child)
        with hsxfer.open_source(store) as source:
            for left in range(number):
                try:
                    with source.get(f"k{left}", framework="numpy", timeout_s=0) as sample:
                        assert (sample["x"] == left % 251).all()
                except (hsxfer.SampleLost, hsxfer.SampleFailed, hsxfer.TransferTimeout):
                    pass
            comes_back(sink)


# ---- the producer dies ----------------------------------------------------------------------------------------------------


def writes_for_ever(my: Any, url: str, instance: str) -> int:
    """In the peer: a child that sends samples, in chunks and out of order, until it is killed."""
    child = os.fork()
    if child == 0:
        sink, number = hsxfer.open_sink(url, instance=instance), 0
        while True:
            rows = pattern(number, (300, 64))
            ticket = sink.begin(f"k{number}", {"x": ((300, 64), "uint8")})
            for start in (250, 0, 100, 50, 200, 150):
                ticket.write("x", start, rows[start : start + 50])
            ticket.commit()
            number += 1
    return child


def kills(my: Any, child: int) -> None:
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_a_producer_killed_while_it_writes(store: str, apart: Callable[[], Peer]) -> None:
    """At 15 random instants. What is delivered is whole; what is not is lost within 5 s, by key and by handle."""
    peer, dice = apart(), random.Random(5)
    outcomes = []
    with hsxfer.open_source(store) as source:
        for round_number in range(15):
            instance = f"round-{round_number}"
            silent = hsxfer.open_sink(store, hsxfer.Rank(tp=(1, 2)), instance=instance)  # derives the same handles
            child = peer(writes_for_ever, store + "?capacity=1MiB", instance)
            number, dead_since = 0, None
            kill_at = time.monotonic() + 0.2 * dice.random() ** 2
            while True:
                handle = silent.begin(f"k{number}", {"x": (SHAPE, "uint8")}).handle
                try:
                    with source.get(handle, framework="numpy", verify=bool(number % 2)) as sample:
                        assert (sample["x"] == pattern(number, SHAPE)).all(), f"sample {number} is torn"
                except hsxfer.SampleLost as error:
                    assert dead_since is not None, "lost while its producer lives"
                    assert time.monotonic() - dead_since < LIVELY_S
                    outcomes.append(error.reason)
                    break
                number += 1
                if dead_since is None and number > 2 and time.monotonic() > kill_at:
                    peer(kills, child)
                    dead_since = time.monotonic()
            started = time.monotonic()
            with pytest.raises(hsxfer.SampleLost):
                source.get(f"k{number}", framework="numpy")
            assert time.monotonic() - started < LIVELY_S
        assert len(list(store_dir(store).glob("*.arena"))) == 1, "each new producer reclaims what the one before left"
    assert set(outcomes) == {"producer died"}


def test_the_waiting_consumer_of_a_killed_producer(store: str, apart: Callable[[], Peer]) -> None:
    """It waits already when the producer dies in the middle of its sample."""
    producer, consumer = apart(), apart()
    producer(opens, store + "?capacity=1MiB")

    def begins(my: Any) -> hsxfer.Handle:
        my.ticket = my.sink.begin("k", {"x": ((300, 64), "uint8")})
        my.ticket.write("x", 0, pattern(1, (100, 64)))
        return my.ticket.handle

    handle = producer(begins)
    with pytest.raises(hsxfer.TransferTimeout):
        consumer(fetch, store, handle, framework="numpy", timeout_s=0)
    consumer.start(fetch, store, handle, framework="numpy", timeout_s=60)
    producer.kill()
    with pytest.raises(hsxfer.SampleLost, match="producer died"):
        consumer.result(LIVELY_S)
    with pytest.raises(hsxfer.SampleLost, match="producer died"):
        consumer(fetch, store, "k", framework="numpy", timeout_s=60)


def test_a_killed_producers_finished_samples_can_still_be_read(store: str, new_peer: Callable[..., Peer]) -> None:
    producer, consumer = new_peer(), new_peer()
    producer(opens, store + "?capacity=1MiB")
    first, second = producer(puts, 1, "a"), producer(puts, 2, "b")
    assert consumer(fetch, store, first, framework="numpy")["x"] == told(pattern(1, SHAPE))
    producer.kill()
    assert consumer(fetch, store, second, framework="numpy")["x"] == told(pattern(2, SHAPE))
    for form in (second, "b"):
        with pytest.raises(hsxfer.SampleLost, match="consumed"):
            consumer(fetch, store, form, framework="numpy")
    with pytest.raises(hsxfer.SampleLost, match="producer died"):
        consumer(fetch, store, "c", framework="numpy")


def test_one_of_two_producers_dies(store: str, new_peer: Callable[..., Peer]) -> None:
    victim = new_peer()
    victim(opens, store + "?capacity=1MiB")
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        source.get(victim(puts, 1)).release()
        victim.kill()
        handle = sink.put({"x": pattern(2, SHAPE)}, "k")
        source.get("k").release()
        with pytest.raises(hsxfer.SampleLost, match="consumed"):
            source.get(handle)


def test_one_of_two_sending_ranks_dies(store: str, new_peer: Callable[..., Peer]) -> None:
    ranks = [new_peer(), new_peer()]
    for number, rank in enumerate(ranks):
        rank(opens, store + "?capacity=1MiB", rank=hsxfer.Rank(tp=(number, 2)), policy="shard", instance="i")
    whole = {rank(puts, 1, "whole") for rank in ranks}.pop()
    half = ranks[0](puts, 2, "half")
    with hsxfer.open_source(store) as source:
        source.get(whole, ack=False, framework="numpy").release()
        ranks[1].kill()
        started = time.monotonic()
        with pytest.raises(hsxfer.SampleLost, match="producer died"):
            source.get(half)
        assert time.monotonic() - started < LIVELY_S
        with source.get(whole, framework="numpy") as sample:
            assert (sample["x"] == pattern(1, SHAPE)).all()


def test_a_stopped_producer_is_not_a_dead_one(store: str, peer: Peer) -> None:
    peer(opens, store + "?capacity=1MiB")
    with hsxfer.open_source(store) as source:
        source.get(peer(puts, 1)).release()
        peer.signal(signal.SIGSTOP)
        try:
            stat = Path(f"/proc/{peer.pid}/stat")
            wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stands")
            with pytest.raises(hsxfer.TransferTimeout, match=r"0\.4 s"):
                source.get("late", timeout_s=0.4)
        finally:
            peer.signal(signal.SIGCONT)
        peer(puts, 2, "late")
        source.get("late").release()


# ---- the producer goes in order -------------------------------------------------------------------------------------------


def test_a_producer_that_closes_leaves_what_is_unread(store: str, new_peer: Callable[..., Peer]) -> None:
    producer = new_peer()
    producer(opens, store + "?capacity=1MiB")
    handles = [producer(puts, seed) for seed in range(3)]
    with hsxfer.open_source(store) as early:
        early.get(handles[0]).release()
        assert producer.close() == 0
        with early.get(handles[1], framework="numpy") as sample:
            assert (sample["x"] == pattern(1, SHAPE)).all()
    with hsxfer.open_source(store) as late:
        with late.get(handles[2], framework="numpy", verify=True) as sample:
            assert (sample["x"] == pattern(2, SHAPE)).all()
        for handle in handles:
            with pytest.raises(hsxfer.SampleLost, match="consumed"):
                late.get(handle)
        for form in (handles[0].to_dict() | {"key": "never"}, "never"):
            started = time.monotonic()
            with pytest.raises(hsxfer.SampleLost, match="closed"):
                late.get(form)
            assert time.monotonic() - started < LIVELY_S
    with hsxfer.open_source(store):
        assert not list(store_dir(store).glob("*.a*")), "all is read: the next one that opens the store tidies up"


def test_a_producer_that_closes_ends_the_waits_for_what_never_comes(store: str, peer: Peer) -> None:
    sink = hsxfer.open_sink(store + "?capacity=1MiB")
    ticket = sink.begin("open", {"x": ((4, 4), "uint8")})
    peer.start(fetch, store, ticket.handle, framework="numpy", timeout_s=60)
    wait_for(lambda: sink.stats()["readers"], "it looks", LIVELY_S)
    sink.close()
    with pytest.raises((hsxfer.SampleFailed, hsxfer.SampleLost), match="closed"):
        peer.result(LIVELY_S)


@pytest.mark.parametrize("published", [True, False])
def test_acknowledging_meets_the_sample_that_was_read(
    store: str, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """Between the look and the acknowledgement others may use the sample up, and a newer one may come under its key."""
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": pattern(1, SHAPE)}, "k")
        make = hsxfer.Sample

        def meanwhile(*args: Any, **kwargs: Any) -> hsxfer.Sample:
            monkeypatch.undo()
            with hsxfer.open_source(store) as other:
                other.get(handle).release()
            sink.put({"x": pattern(2, SHAPE)}, "k")
            if published:
                sink.flush()
            return make(*args, **kwargs)

        monkeypatch.setattr("hsxfer.source.Sample", meanwhile)
        with pytest.raises(hsxfer.SampleLost, match="consumed"):
            source.get(handle, framework="numpy")
        with source.get("k", framework="numpy") as sample:
            assert (sample["x"] == pattern(2, SHAPE)).all(), "the newer one is whole and not used up"


# ---- what the dead leave ----------------------------------------------------------------------------------------------------


def arenas(url: str) -> set[str]:
    return {path.name for path in store_dir(url).iterdir()}


def test_a_new_sink_reclaims_what_the_dead_left_and_nothing_else(store: str, new_peer: Callable[..., Peer]) -> None:
    dead, living, closed, empty = (new_peer() for _ in range(4))
    for peer, instance in ((dead, "dead"), (living, "living"), (closed, "closed"), (empty, "empty")):
        peer(opens, store + "?capacity=1MiB", instance=instance)
    for peer in (dead, living, closed):
        peer(puts, 1, "k")
    with hsxfer.open_source(store) as source:
        sample = source.get(dead(puts, 2, "held"), framework="numpy")
        dead.kill()
        closed.close()
        empty.close()
        assert {name.partition(".")[0] for name in arenas(store)} == {"dead", "living", "closed"}
        with hsxfer.open_source(store):
            assert {name.partition(".")[0] for name in arenas(store)} == {"dead", "living", "closed"}, "still unread"
        with hsxfer.open_sink(store + "?capacity=1MiB", instance="new"):
            assert {name.partition(".")[0] for name in arenas(store)} == {"living", "closed", "new"}
        assert (sample["x"] == pattern(2, SHAPE)).all(), "whoever holds a view keeps it"


def test_unread_samples_of_the_gone_stay_for_their_time(store: str, new_peer: Callable[..., Peer]) -> None:
    """Counted from the last sample, not from the arena's creation."""
    closed, killed = new_peer(), new_peer()
    for peer, instance in ((closed, "closed"), (killed, "killed")):
        peer(opens, store + "?capacity=1MiB&unread_ttl_s=100", instance=instance)
        peer(puts, 0)  # the first touch of each page also sets the time
        peer(lambda my: setattr(my.sink._arena, "_touched_s", 0.0))  # which is told once a second
        for path in store_dir(store).glob(f"{instance}.*"):
            os.utime(path, (time.time() - 1000, time.time() - 1000))
    handles = [closed(puts, 1), killed(puts, 2)]
    closed.close()
    killed.kill()
    with hsxfer.open_source(store) as source:
        for seed, handle in enumerate(handles, 1):
            with source.get(handle, framework="numpy", ack=False) as sample:
                assert (sample["x"] == pattern(seed, SHAPE)).all()
    for path in store_dir(store).glob("*.ack"):
        os.utime(path, (time.time() - 101, time.time() - 101))
    with hsxfer.open_source(store):
        assert arenas(store) == set()


def test_half_a_birth_is_tidied_up(store: str) -> None:
    """A producer killed after its .ack had a name and before its .arena had one."""
    with hsxfer.open_sink(store + "?capacity=1MiB", instance="a"):
        orphan, newborn = (store_dir(store) / f"{name}.dp0-pp0-tp0.ack" for name in ("old", "new"))
        for path in (orphan, newborn):
            path.write_bytes(bytes(4096))
        os.utime(orphan, (time.time() - ORPHAN_S - 1,) * 2)
        with hsxfer.open_sink(store + "?capacity=1MiB", instance="b"):
            assert not orphan.exists()
            assert newborn.exists()
            assert len(arenas(store)) == 5


def test_a_server_that_starts_again_and_again_costs_its_consumer_nothing(store: str) -> None:
    """A trainer that goes by handles must not keep the arena of every server that there was."""
    with hsxfer.open_source(store) as source:
        for seed in range(5):
            with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
                source.get(sink.put({"x": pattern(seed, SHAPE)})).release()
                comes_back(sink)
        mapped = Path("/proc/self/maps").read_text().count(store.removeprefix("shm://") + "/")
        assert mapped <= 2, "one arena and its acknowledgement file at most"


def test_two_sinks_of_one_name(store: str, peer: Peer) -> None:
    peer(opens, store + "?capacity=1MiB", instance="same")
    with pytest.raises(hsxfer.ConfigError, match="already there"):
        hsxfer.open_sink(store + "?capacity=1MiB", instance="same")
    with hsxfer.open_sink(store + "?capacity=1MiB", instance="other") as sink, hsxfer.open_source(store) as source:
        for handle in (peer(puts, 1, "k"), sink.put({"x": pattern(2, SHAPE)}, "k")):
            with source.get(handle, framework="numpy") as sample:
                assert (sample["x"] == pattern(1 if handle.instance == "same" else 2, SHAPE)).all()

"""Forked children: refused with the reason, at once, and without harm to their parent."""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from peer import Peer, in_child, pattern, told, wait_for
from stores import store_dir

import hsxfer

SHAPE = (300, 64)


@pytest.fixture
def parent(peer: Peer, store: str) -> Peer:
    """A process with an open sink, a ticket, and a sample that it holds. (It has no torch, whose threads do not like to be forked.)"""

    def set_up(my: Any, url: str) -> None:
        my.sink = hsxfer.open_sink(url + "?capacity=1MiB", instance="i")
        my.source = hsxfer.open_source(url)
        my.ticket = my.sink.begin("ticket", {"x": ((300, 64), "uint8")})
        my.held = my.source.get(my.sink.put({"x": pattern(1, (300, 64))}), framework="numpy")
        my.view = my.held["x"]

    peer(set_up, store)
    return peer


REFUSED: dict[str, Callable[[Any], Any]] = {
    "put": lambda my: my.sink.put({"x": pattern(1, (2, 2))}),
    "begin": lambda my: my.sink.begin("k", {"x": ((2, 2), "uint8")}),
    "reject": lambda my: my.sink.reject("k", {"x": ((2, 2), "uint8")}, "no"),
    "write": lambda my: my.ticket.write("x", 0, pattern(1, (300, 64))),
    "commit": lambda my: my.ticket.commit(),
    "abort": lambda my: my.ticket.abort("no"),
    "flush": lambda my: my.sink.flush(),
    "stats": lambda my: my.sink.stats(),
    "get": lambda my: my.source.get("k"),
    "prefetch": lambda my: next(my.source.prefetch(["k"])),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_child_is_refused_and_its_parent_goes_on(parent: Peer, store: str, call: str) -> None:
    with pytest.raises(hsxfer.TransportUnavailable, match="forked"):
        parent(in_child, parent_code(REFUSED[call]))

    def goes_on(my: Any) -> None:
        my.ticket.write("x", 0, pattern(2, (300, 64)))
        my.ticket.commit()
        with my.source.get("ticket", framework="numpy", verify=True) as sample:
            assert (sample["x"] == pattern(2, (300, 64))).all()

    parent(goes_on)
    with hsxfer.open_source(store) as source:
        parent(lambda my: my.sink.put({"x": pattern(3, (300, 64))}, "other"))
        with source.get("other", framework="numpy") as sample:
            assert told(sample["x"]) == told(pattern(3, SHAPE))


def parent_code(function: Callable[..., Any]) -> bytes:
    return marshal.dumps(function.__code__)


def busy(my: Any) -> None:
    """Writes over all memory that is free."""
    for seed in range(100, 108):
        with my.source.get(my.sink.put({"x": pattern(seed, (300, 1000))}), framework="numpy") as sample:
            assert (sample["x"] == pattern(seed, (300, 1000))).all()


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "kill"])
def test_a_lease_outlives_the_end_of_a_child(parent: Peer, end: str) -> None:
    """And what the child does with its copy of the sample: POSIX locks go at any close of the file in the process that has them."""

    def fork(my: Any, end: str) -> int:
        child = os.fork()
        if child == 0:
            my.held.release()
            del my.view
            my.source.close()
            my.sink.close()
            if end == "kill":
                os.kill(os.getpid(), 9)
            if end == "sys.exit(0)":
                raise SystemExit(0)  # the interpreter's own end, with atexit and all
            os._exit(0)
        return os.waitpid(child, 0)[1]

    assert parent(fork, end) == (9 if end == "kill" else 0)
    parent(busy)
    assert parent(lambda my: told(my.view)) == told(pattern(1, SHAPE))
    assert parent(lambda my: my.sink.stats()["used_bytes"]) == 2 * 300 * 64

    def lets_go(my: Any) -> None:
        my.held.release()
        del my.view
        my.ticket.abort("done")
        wait_for(lambda: my.sink.stats()["used_bytes"] == 0, "the space is back", 5)

    parent(lets_go)


def test_a_child_may_read_what_its_parent_holds(parent: Peer) -> None:
    assert parent(in_child, parent_code(lambda my: told(my.held["x"]))) == told(pattern(1, SHAPE))


def test_a_child_opens_its_own(parent: Peer, store: str) -> None:
    def child(my: Any) -> Any:
        with hsxfer.open_sink(my.sink.store + "?capacity=1MiB") as sink, hsxfer.open_source(my.sink.store) as source:
            with source.get(sink.put({"x": pattern(5, (300, 64))}), framework="numpy") as sample:
                return told(sample["x"])

    assert parent(in_child, parent_code(child)) == told(pattern(5, SHAPE))
    parent(busy)
    assert parent(lambda my: told(my.view)) == told(pattern(1, SHAPE))


def test_a_child_does_not_wait_for_a_lock_that_a_thread_of_its_parent_had(parent: Peer) -> None:
    def lock(my: Any) -> None:
        for holder in (my.sink, my.source, my.source._store.readers()[0]):
            thread = threading.Thread(target=holder._lock.acquire)
            thread.start()
            thread.join()

    parent(lock)

    def all_calls(my: Any) -> int:
        for call in (
            lambda: my.sink.put({"x": b"1"}),
            lambda: my.ticket.commit(),
            lambda: my.ticket.write("x", 0, b"1"),
            lambda: my.source.get("k"),
        ):
            with contextlib.suppress(hsxfer.TransportUnavailable):
                call()
        my.held.release()
        my.sink.close()
        my.source.close()
        del my.source, my.held, my.view
        gc.collect()
        return 7

    parent.start(in_child, parent_code(all_calls))
    assert parent.result(5) == 7
    parent.kill()


def test_multiprocessing_with_fork(parent: Peer) -> None:
    """As a DataLoader starts its workers."""

    def work(my: Any) -> list[Any]:
        import multiprocessing

        def worker(pipe: Any) -> None:
            try:
                pipe.send(my.source.get("k"))
            except hsxfer.TransportUnavailable as error:
                pipe.send(str(error))

        answers = []
        context = multiprocessing.get_context("fork")
        for _ in range(3):
            mine, theirs = context.Pipe()
            process = context.Process(target=worker, args=(theirs,))
            process.start()
            answers.append(mine.recv())
            process.join()
        return answers

    assert all("Open one in each process" in answer for answer in parent(work))
    parent(busy)
    assert parent(lambda my: told(my.view)) == told(pattern(1, SHAPE))


def test_a_forked_child_keeps_no_dead_producer_alive(store: str, peer: Peer) -> None:
    """The child of a killed producer lives on with all its descriptors."""

    def with_child(my: Any, url: str) -> int:
        my.sink = hsxfer.open_sink(url + "?capacity=1MiB")
        my.ticket = my.sink.begin("k", {"x": ((300, 64), "uint8")})
        child = os.fork()
        if child == 0:
            os.close(1)
            os.setsid()
            for descriptor in range(3, 64):  # the pipe by which the test sees the end of its parent
                if os.path.exists(f"/proc/self/fd/{descriptor}") and "pipe" in os.readlink(
                    f"/proc/self/fd/{descriptor}"
                ):
                    os.close(descriptor)
            os.close(0)
            time.sleep(60)
            os._exit(0)
        return child

    child = peer(with_child, store)
    try:
        with hsxfer.open_source(store) as source:
            with pytest.raises(hsxfer.TransferTimeout):
                source.get("k", timeout_s=0.1)
            peer.kill()
            with pytest.raises(hsxfer.SampleLost, match="producer died"):
                source.get("k", timeout_s=5)
        with hsxfer.open_sink(store + "?capacity=1MiB", instance="next"):
            assert {path.name.partition(".")[0] for path in store_dir(store).iterdir()} == {"next"}
    finally:
        os.kill(child, 9)

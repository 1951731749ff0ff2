"""What goes wrong on a GPU, or to the processes that share it."""

from __future__ import annotations

import os

import pytest
from gpu import random_rows, same
from peer import Peer

import hsxfer


def test_a_sticky_error_fails_what_is_under_way(store: str, peer: Peer) -> None:
    """The engine's context is broken for good: its samples fail with the reason, and nothing hangs."""

    def produce(my, url):
        import torch

        my.sink = hsxfer.open_sink(url + "?capacity=512MiB")
        rows = torch.ones(20_000, 4096, dtype=torch.bfloat16, device="cuda")
        my.sink.put({"x": rows[:10]}, key="before")
        my.sink.flush()
        index = torch.full((1,), 1 << 40, device="cuda")
        rows.flatten()[index] = 1  # an assertion of torch's, on the device
        my.sink.put({"x": rows}, key="after")
        my.sink.put({"x": rows}, key="later")
        my.sink.flush(timeout_s=20)
        my.rows = rows  # freeing it would raise

    peer(produce, store)
    with hsxfer.open_source(store) as source:
        assert float(source.get("before")["x"].float().mean()) == 1
        for key in ("after", "later"):
            with pytest.raises(hsxfer.SampleFailed, match=r"cu[A-Z]") as failed:
                source.get(key, device="cuda:0", timeout_s=10)
            assert "cu" in failed.value.reason


@pytest.mark.parametrize("used", [False, True])
def test_a_fork_is_refused(peer: Peer, used: bool) -> None:
    def fork(my, used):
        import torch

        from hsxfer.fetch import stream_of

        torch.zeros(1, device="cuda")
        if used:
            stream_of(0)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                stream_of(0)
                os.write(writer, b"it worked")
            except hsxfer.TransportUnavailable as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return os.read(reader, 1000).decode()

    assert "forked: start processes with spawn" in peer(fork, used)


def test_two_sinks_on_one_gpu(store: str, new_peer) -> None:
    def open_one(my, url, rank):
        import torch

        my.sink = hsxfer.open_sink(url + "?capacity=64MiB", hsxfer.Rank(dp=(rank, 2)), instance="one")
        my.rows = torch.full((3000, 1000), rank, dtype=torch.bfloat16, device="cuda")

    peers = [new_peer() for _ in range(2)]
    for rank, peer in enumerate(peers):
        peer(open_one, store, rank)
    for number in range(5):
        for rank, peer in enumerate(peers):
            peer(lambda my, key: my.sink.put({"x": my.rows}, key=key).to_json(), f"{rank}-{number}")
    with hsxfer.open_source(store) as source:
        for rank in range(2):
            for number in range(5):
                assert bool((source.get(f"{rank}-{number}", device="cuda:0")["x"] == rank).all())


def test_a_consumer_killed_in_the_middle_gives_its_slots_back(store: str, peer: Peer) -> None:
    rows = random_rows(16_384, 3072)
    with hsxfer.open_sink(store + "?capacity=110MB&block_s=10") as sink, hsxfer.open_source(store) as source:
        ticket = sink.begin("s", {"x": ((16_384, 3072), "bfloat16")})
        ticket.write("x", 0, rows[:9000])

        def read(my, url):
            my.source = hsxfer.open_source(url)
            return my.source.get("s", device="cuda:0")

        peer.start(read, store)
        sink.flush()
        peer.kill()
        ticket.write("x", 9000, rows[9000:])
        handle = ticket.commit()
        assert same(source.get(handle, device="cuda:0")["x"], rows)
        assert same(source.get(sink.put({"x": rows}), device="cuda:0")["x"], rows)  # there is room again


def test_an_arena_larger_than_memory(store: str) -> None:
    with pytest.raises(hsxfer.StoreFull):
        hsxfer.open_sink(store + "?capacity=200TiB")


def test_a_device_that_is_not_there(store: str) -> None:
    with hsxfer.open_sink(store + "?capacity=16MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": random_rows(3, 4)})
        with pytest.raises((hsxfer.TransportUnavailable, RuntimeError), match="device"):
            source.get(handle, device="cuda:99")
        source.get(handle, device="cuda:0")  # the attempt used nothing up

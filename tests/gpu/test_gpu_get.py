"""An arena's rows into the memory of a GPU: whole, in part, while they still arrive, and when something goes wrong."""

from __future__ import annotations

import threading
import time

import pytest
from gpu import random_rows, same, slow_stream, torch
from peer import told
from stores import store_dir

import hsxfer
from hsxfer.fetch import stream_of

BIG = 16_384, 3072  # 100 MB, 12 pieces


@pytest.mark.parametrize("shape", [(1, 8), (3, 5), (0, 7), (1000, 3072), (2, 4_000_001), (20_000, 2), (*BIG,)])
@pytest.mark.parametrize("origin", ["cuda", "cpu"])
def test_whole(store: str, shape: tuple[int, int], origin: str) -> None:
    rows = random_rows(*shape).to(origin)
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": rows}, token_ids=list(range(shape[0])))
        with source.get(handle, device="cuda:0") as sample:
            assert sample["x"].device.type == "cuda"
            assert same(sample["x"], rows)
            assert sample.token_ids.tolist() == list(range(shape[0]))
        assert sink.stats()["used_bytes"] == 0  # though the tensor may live on


def test_part(store: str) -> None:
    rows = {"x": random_rows(*BIG), "y": random_rows(BIG[0], 64)}
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        for start, stop in ((0, 1), (5000, 9000), (16_000, BIG[0])):
            handle = sink.put(rows)
            sample = source.get(handle, device="cuda", names=["x"], rows=slice(start, stop))
            assert same(sample["x"], rows["x"][start:stop])


def test_without_digests(store: str) -> None:
    rows = random_rows(*BIG)
    with hsxfer.open_sink(store + "?capacity=256MiB&digest=off") as sink, hsxfer.open_source(store) as source:
        assert same(source.get(sink.put({"x": rows}), device="cuda:0")["x"], rows)


def test_a_damaged_row_is_found_where_it_landed(store: str) -> None:
    rows = random_rows(*BIG)
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": rows})
        sink.flush()
        ticket_slot = source.get(handle, ack=False, framework="memoryview")  # where it lies, to damage it there
        view = memoryview(ticket_slot["x"]).cast("B")
        damage(store, view, 12_345 * BIG[1] * 2 + 77)
        with pytest.raises(hsxfer.IntegrityError, match="row 12345 of 'x'"):
            source.get(handle, device="cuda:0", ack=False)
        assert source.get(handle, device="cuda:0", verify=False, ack=False)["x"].shape == BIG
        with pytest.raises(hsxfer.IntegrityError):
            source.get(handle, device="cuda:0")
        with pytest.raises(hsxfer.SampleLost, match="consumed"):  # read, though not good
            source.get(handle, device="cuda:0")


def damage(store: str, view: memoryview, offset: int) -> None:
    """Flips a bit in the arena's file, found by the bytes around it."""
    around = bytes(view[offset : offset + 64])
    (path,) = store_dir(store).glob("*.arena")
    with open(path, "r+b") as file:
        data = file.read()
        at = data.find(around)
        assert at > 0
        assert data.find(around, at + 1) < 0
        file.seek(at)
        file.write(bytes([around[0] ^ 1]))


def test_copies_start_before_the_sample_is_ready(store: str) -> None:
    rows = random_rows(*BIG)
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        sink.put({"x": rows[:1]})
        ticket = sink.begin("s", {"x": (BIG, "bfloat16")})
        got = []
        reader = threading.Thread(target=lambda: got.append(source.get("s", device="cuda:0")))
        reader.start()
        order = [9000, 0, 4000, 13_000]
        for start in order:
            time.sleep(0.02)
            ticket.write("x", start, rows[start : {0: 4000, 4000: 9000, 9000: 13_000, 13_000: BIG[0]}[start]])
        ticket.commit()
        reader.join(20)
        assert same(got[0]["x"], rows)


def test_rows_written_again_while_they_are_read(store: str) -> None:
    first, rows = random_rows(*BIG, seed=1), random_rows(*BIG, seed=2)
    with hsxfer.open_sink(store + "?capacity=256MiB&digest=off") as sink, hsxfer.open_source(store) as source:
        sink.put({"x": rows[:1]})
        ticket = sink.begin("s", {"x": (BIG, "bfloat16")})
        got = []
        reader = threading.Thread(target=lambda: got.append(source.get("s", device="cuda:0")))
        reader.start()
        ticket.write("x", 0, first[:12_000])
        time.sleep(0.1)  # so that the reader has them
        ticket.write("x", 8000, rows[8000:])
        ticket.write("x", 0, rows[:9000])
        ticket.commit()
        reader.join(20)
        assert same(got[0]["x"], rows)


def test_failure_while_it_is_read(store: str) -> None:
    rows = random_rows(*BIG)
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        ticket = sink.begin("s", {"x": (BIG, "bfloat16")})
        got = []

        def read() -> None:
            try:
                source.get("s", device="cuda:0")
            except hsxfer.SampleFailed as error:
                got.append(error.reason)

        reader = threading.Thread(target=read)
        reader.start()
        ticket.write("x", 0, rows[:9000])
        time.sleep(0.05)
        ticket.abort("enough")
        reader.join(20)
        assert got == ["enough"]


def test_timeout_while_it_is_read(store: str) -> None:
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        ticket = sink.begin("s", {"x": (BIG, "bfloat16")})
        ticket.write("x", 0, random_rows(9000, BIG[1]))
        with pytest.raises(hsxfer.TransferTimeout):
            source.get("s", device="cuda:0", timeout_s=0.3)
        ticket.write("x", 9000, random_rows(BIG[0] - 9000, BIG[1]))
        ticket.commit()
        source.get("s", device="cuda:0")  # the attempt used nothing up


def test_does_not_wait_for_the_trainers_stream(store: str) -> None:
    rows = random_rows(2000, 1024)
    with hsxfer.open_sink(store + "?capacity=64MiB") as sink, hsxfer.open_source(store) as source:
        source.get(sink.put({"x": rows}), device="cuda:0")
        handle = sink.put({"x": rows})
        stream = slow_stream(200)
        with torch.cuda.stream(stream):
            sample = source.get(handle, device="cuda:0")
            assert not stream.query()
            doubled = sample["x"].view(torch.int16) * 2
        stream.synchronize()
        assert torch.equal(doubled, rows.view(torch.int16) * 2)


def test_memory_is_not_given_out_again_under_a_kernel(store: str) -> None:
    """The tensor dies while the caller's stream still has work that reads it; the next get must not land there."""
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        expected, sums = [], []
        stream = torch.cuda.Stream()
        for seed in range(8):
            rows = random_rows(2000, 1024, "uint8", seed)
            expected.append(int(rows.sum(dtype=torch.int64)))
            handle = sink.put({"x": rows})
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                sums.append(source.get(handle, device="cuda:0")["x"].sum(dtype=torch.int64))
        stream.synchronize()
        assert [int(value) for value in sums] == expected


def test_prefetch(store: str) -> None:
    rows = [random_rows(3000, 512, seed=seed) for seed in range(12)]
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink, hsxfer.open_source(store) as source:
        handles = [sink.put({"x": one}) for one in rows]
        for sample, right in zip(source.prefetch(handles, device="cuda:0", depth=3), rows, strict=True):
            assert same(sample["x"], right)
            sample.release()


def test_shards(store: str) -> None:
    rows = random_rows(1001, 256)
    ranks = [hsxfer.Rank(tp=(i, 3)) for i in range(3)]
    sinks = [hsxfer.open_sink(store + "?capacity=32MiB", rank, "shard", instance="one") for rank in ranks]
    tickets = [sink.begin("s", {"x": ((1001, 256), "bfloat16")}) for sink in sinks]
    for start, stop in ((0, 500), (450, 1001), (480, 520)):
        for ticket in tickets:
            ticket.write("x", start, rows[start:stop])
    for ticket in tickets:
        ticket.commit()
    with hsxfer.open_source(store) as source:
        assert same(source.get("s", device="cuda:0", ack=False)["x"], rows)
        assert same(source.get("s", device="cuda:0", rows=slice(350, 700))["x"], rows[350:700])
    for sink in sinks:
        sink.close()


def test_cupy(store: str) -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.random.random((500, 300), dtype=cupy.float32)
    with hsxfer.open_sink(store + "?capacity=32MiB") as sink, hsxfer.open_source(store) as source:
        got = source.get(sink.put({"x": array}), framework="cupy")["x"]
        assert isinstance(got, cupy.ndarray)
        assert bool((got == array).all())


def test_another_process(store: str, peer) -> None:
    rows = random_rows(*BIG)
    with hsxfer.open_sink(store + "?capacity=256MiB") as sink:
        peer(lambda my, url: setattr(my, "source", hsxfer.open_source(url)), store)
        for seed in range(3):
            rows = random_rows(*BIG, seed=seed)
            peer.start(lambda my, key: told(my.source.get(key, device="cuda:0")["x"].cpu()), f"k{seed}")
            sink.put({"x": rows}, key=f"k{seed}")
            assert peer.result() == told(rows.cpu())


def test_the_producer_dies_while_it_is_read(store: str, peer) -> None:
    def produce(my, url):
        import torch

        my.sink = hsxfer.open_sink(url + "?capacity=256MiB")
        my.ticket = my.sink.begin("s", {"x": ((16_384, 3072), "bfloat16")})
        my.ticket.write("x", 0, torch.ones(9000, 3072, dtype=torch.bfloat16, device="cuda"))
        my.sink.flush()

    peer(produce, store)
    threading.Timer(0.5, peer.kill).start()
    with hsxfer.open_source(store) as source, pytest.raises(hsxfer.SampleLost) as lost:
        source.get("s", device="cuda:0")
    assert lost.value.reason == "producer died"


def test_an_arena_of_8_gib_does_not_stall_the_first_get(store: str) -> None:
    with hsxfer.open_sink(store + "?capacity=8GiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": random_rows(64, 64)})
        sink.flush()
        torch.zeros(1, device="cuda")
        stream_of(0)
        start = time.monotonic()
        source.get(handle, device="cuda:0")
        assert time.monotonic() - start < 0.1

"""From a tensor in one process to a tensor in another, against what an engine does without hsxfer."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import hsxfer

from .measure import Measure
from .peer import checksum, peer
from .workloads import WIDTH, new_store, random_rows

SIZE = 64 << 20


def way(sink: hsxfer.Sink, pipe: Connection, tensor: torch.Tensor, read: bool, verify: bool = False) -> float:
    """Seconds from the tensor here to the tensor there, the handle's JSON over a pipe."""
    pipe.send(("take", read, verify))
    start = time.perf_counter()
    pipe.send_bytes(sink.put({"hidden_states": tensor}).to_json().encode())
    end, found = pipe.recv()
    assert not verify or found == checksum(tensor)
    return float(end - start)


def lists_way(pipe: Connection, tensor: torch.Tensor, form: str, read: bool, verify: bool = False) -> float:
    pipe.send(("take lists", form, read, verify))
    start = time.perf_counter()
    lists = tensor.cpu().clone().tolist()
    pipe.send_bytes(json.dumps(lists).encode() if form == "json" else pickle.dumps(lists, pickle.HIGHEST_PROTOCOL))
    end, found = pipe.recv()
    assert not verify or found == checksum(tensor)
    return float(end - start)


def cpu_seconds(way: Callable[[], Any]) -> float:
    """Of all threads of this process."""
    start = time.process_time()
    way()
    return time.process_time() - start


@pytest.mark.parametrize(
    ("name", "form", "read"),
    [
        ("way: 64 MiB of bfloat16 to another process", "pickle", False),
        ("way: the same, every byte read there", "pickle", True),
        ("way: the same, CPU time of the sending process", "pickle", False),
        ("way: 64 MiB of bfloat16, against JSON", "json", False),
    ],
)
def test_way(measure: Measure, quick: bool, name: str, form: str, read: bool) -> None:
    num_bytes = SIZE >> 10 if quick else SIZE
    tensor = torch.randn(num_bytes // (2 * WIDTH), WIDTH).bfloat16()
    with new_store(2 * num_bytes) as url, hsxfer.open_sink(url) as sink, peer(sink.store) as pipe:
        for _ in range(2 if quick else 6):  # goes round the arena, so that all of it is warm on both sides
            way(sink, pipe, tensor, read=True, verify=True)
        small = tensor[:16]
        lists_way(pipe, small, form, read, verify=True)

        def ours() -> float:
            return way(sink, pipe, tensor, read)

        def theirs() -> float:
            return lists_way(pipe, tensor, form, read)

        cpu = "CPU time" in name
        measure(
            name,
            (lambda: cpu_seconds(ours)) if cpu else ours,
            baseline=(lambda: cpu_seconds(theirs)) if cpu else theirs,
            num_bytes=0 if cpu else num_bytes,
            rounds=3 if form == "json" else 7,
            warmup=1,
            own_clock=True,
        )


def test_wake(measure: Measure, quick: bool) -> None:
    """The consumer already sleeps in `get`, with a handle that exists since `begin`."""
    tensor = random_rows(4096)
    shapes = {"hidden_states": (tensor.shape, "bfloat16")}

    def wake() -> float:
        ticket = sink.begin(None, shapes)
        pipe.send(("wait for", ticket.handle.to_json()))
        time.sleep(0.003)
        start = time.perf_counter()
        ticket.write("hidden_states", 0, tensor)
        ticket.commit()
        end, found = pipe.recv()
        assert found == checksum(tensor)
        return float(end - start)

    def word() -> float:
        pipe.send(("wait for word",))
        time.sleep(0.003)
        start = time.perf_counter()
        pipe.send_bytes(b"12345678")
        end, found = pipe.recv()
        assert found == b"12345678"
        return float(end - start)

    with new_store(1 << 20) as url, hsxfer.open_sink(url) as sink, peer(sink.store) as pipe:
        measure(
            "way: write and commit of 4 KiB to a waiting get in another process",
            wake,
            baseline=word,
            rounds=500,
            warmup=20,
            own_clock=True,
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stream: 1 MiB samples through a 64 MiB arena", {}),
        ("stream: the same, copied and checked by the consumer", {"copy": True}),
    ],
)
def test_stream(measure: Measure, quick: bool, name: str, options: dict[str, bool]) -> None:
    """The producer is held back by the arena, the baseline's by its pipe. Per sample."""
    num, num_bytes = (8, 1 << 14) if quick else (512, 1 << 20)
    tensor = random_rows(num_bytes)
    first = num * int(tensor.view(torch.int16)[0, 0])
    tensors = {"hidden_states": tensor}

    def stream() -> float:
        pipe.send(("stream", num, options))
        start = time.perf_counter()
        for _ in range(num):
            pipe.send_bytes(sink.put(tensors).to_json().encode())
        end, found = pipe.recv()
        assert found == first
        return float(end - start)

    def stream_bytes() -> float:
        data = tensor.view(torch.uint8).numpy().data.cast("B")
        pipe.send(("stream bytes", num))
        start = time.perf_counter()
        for _ in range(num):
            pipe.send_bytes(data)
        end, found = pipe.recv()
        assert found == first
        return float(end - start)

    with new_store(64 * num_bytes) as url, hsxfer.open_sink(url) as sink, peer(sink.store) as pipe:
        measure(
            name,
            stream,
            baseline=stream_bytes,
            num_bytes=num * num_bytes,
            per=num,
            rounds=15,
            own_clock=True,
        )

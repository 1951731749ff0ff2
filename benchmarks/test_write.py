"""A tensor of the host into shared memory: put or write_many, and flush; against one memmove of the same bytes."""

from __future__ import annotations

from typing import Any

import pytest

import hsxfer

from .measure import Measure
from .rows import WRITES
from .workloads import SharedMemory, Tensors, new_store, random_rows, same_bytes, store, tensors_of

PUTS = [what for what in WRITES if "request" not in what]
BATCHES = [what for what in WRITES if "request" in what]
REQUEST_WIDTH = 3072


def check(source: hsxfer.Source, handle: Any, sent: Tensors) -> None:
    """Reads the sample, which uses it up, and holds every byte to what was sent."""
    with source.get(handle, verify=True) as sample:
        for name, tensor in sent.items():
            assert same_bytes(sample[name], tensor), name


@pytest.mark.parametrize("digest", ["off", "on"])
@pytest.mark.parametrize("what", PUTS)
def test_put(measure: Measure, quick: bool, what: str, digest: str) -> None:
    tensors = tensors_of(what, quick)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    plain, memory = random_rows(num_bytes), SharedMemory(num_bytes)
    handles: list[Any] = []

    def put() -> None:
        handles.append(sink.put(tensors))
        sink.flush()

    def take_last() -> None:
        source.get(handles.pop()).release()

    with store(num_bytes, digest=digest) as (sink, source):
        put()
        check(source, handles.pop(), tensors)
        measure(
            f"write: {what}, digest {digest}",
            put,
            baseline=lambda: memory.memmove(plain),
            after=take_last,
            num_bytes=num_bytes,
        )


@pytest.mark.parametrize("digest", ["off", "on"])
@pytest.mark.parametrize("what", BATCHES)
def test_write_many(measure: Measure, quick: bool, what: str, digest: str) -> None:
    num_requests, tokens = (int(what.split()[i]) for i in (0, 3))
    if quick:
        num_requests, tokens = 8, 8
    whole = random_rows(num_requests * tokens * 2 * REQUEST_WIDTH, REQUEST_WIDTH)
    chunks = whole.split(tokens)
    memory = SharedMemory(whole.nbytes)
    tickets: list[hsxfer.Ticket] = []

    def begin() -> None:
        shapes = {"hidden_states": (chunks[0].shape, "bfloat16")}
        tickets[:] = [sink.begin(None, shapes) for _ in chunks]

    def write() -> None:
        sink.write_many([(ticket, "hidden_states", 0, chunk) for ticket, chunk in zip(tickets, chunks, strict=True)])
        sink.flush()

    def finish(verify: bool = False) -> None:
        for ticket, chunk in zip(tickets, chunks, strict=True):
            handle = ticket.commit()
            if verify:
                check(source, handle, {"hidden_states": chunk})
            else:
                source.get(handle).release()

    with store(whole.nbytes, digest=digest) as (sink, source):
        begin()
        write()
        finish(verify=True)
        measure(
            f"write: {what}, digest {digest}",
            write,
            baseline=lambda: memory.memmove(whole),
            before=begin,
            after=finish,
            num_bytes=whole.nbytes,
        )


def test_first_pass(measure: Measure, quick: bool) -> None:
    """A new arena each round: its pages are reserved, but this process has not yet touched them."""
    tensors = tensors_of("one tensor, 64 MiB", quick)
    tensor = tensors["hidden_states"]
    memory = SharedMemory(tensor.nbytes)
    sinks: list[hsxfer.Sink] = []

    def put() -> None:
        sinks[-1].put(tensors, key="first")
        sinks[-1].flush()

    def take() -> None:
        with sinks.pop() as sink, hsxfer.open_source(sink.store) as source:
            check(source, "first", tensors)

    with new_store(tensor.nbytes) as url:
        measure(
            "write: one tensor, 64 MiB, first pass through a new arena",
            put,
            baseline=lambda: memory.memmove(tensor),
            num_bytes=tensor.nbytes,
            after=take,
            rounds=15,
            before=lambda: sinks.append(hsxfer.open_sink(url)),
        )


def test_open_sink(measure: Measure, quick: bool) -> None:
    num_bytes = 1 << (20 if quick else 30)
    sinks: list[hsxfer.Sink] = []
    with new_store(num_bytes) as url:
        measure(
            "open_sink with 1 GiB",
            lambda: sinks.append(hsxfer.open_sink(url)),
            after=lambda: sinks.pop().close(),
            rounds=10,
            warmup=1,
        )

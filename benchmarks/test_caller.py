"""What the engine's thread pays: the call alone, while a native thread moves the bytes."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

import hsxfer

from .measure import Measure
from .rows import COMPANY, PUT_SIZES
from .workloads import random_rows, same_bytes, store

SWITCH_S = 0.005  # how long a Python thread runs before another may ask for the lock


class Company:
    """Nobody, or a Python thread that does not rest while it is `called`; the rest of a round goes without it."""

    def __init__(self, kind: str) -> None:
        self.busy = kind != "alone"
        self._called = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._stop:
            self._called.wait()
            sum(range(100))

    def call(self) -> None:
        """Returns out of work, as an engine's thread comes to a call, and at any point of this thread's slice: after a wait a
        call would have the whole of it before it, and a core that wakes up."""
        if self.busy:
            self._called.set()
            time.sleep(0)
        until = time.perf_counter() + random.uniform(0, SWITCH_S)
        while time.perf_counter() < until:
            pass

    def send_away(self) -> None:
        self._called.clear()

    def __enter__(self) -> Company:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._called.set()
        self._thread.join()


@pytest.mark.parametrize("kind", COMPANY)
@pytest.mark.parametrize("size", PUT_SIZES)
def test_put(measure: Measure, quick: bool, size: str, kind: str) -> None:
    tensors = {"hidden_states": random_rows(min(PUT_SIZES[size], 1 << 16) if quick else PUT_SIZES[size])}
    handles: list[Any] = []

    def put() -> None:
        handles.append(sink.put(tensors))

    def take() -> None:
        company.send_away()
        sink.flush()
        source.get(handles.pop()).release()

    num_bytes = tensors["hidden_states"].nbytes
    with store(2 * num_bytes + (1 << 20)) as (sink, source), Company(kind) as company:
        with source.get(sink.put(tensors)) as sample:
            assert same_bytes(sample["hidden_states"], tensors["hidden_states"])
        rounds = 300 if num_bytes > 1 << 24 else 1000
        measure(
            f"caller: put of {size}, {kind}", put, before=company.call, after=take, rounds=rounds, warmup=20, cpu=True
        )


@pytest.mark.parametrize("kind", COMPANY)
@pytest.mark.parametrize("num", [64, 512])
def test_write_many(measure: Measure, quick: bool, num: int, kind: str) -> None:
    """One decode step or small chunk of `num` requests: 16 tokens of each."""
    tokens, width = 16, 3072
    whole = random_rows(num * tokens * 2 * width, width)
    chunks = whole.split(tokens)
    tickets: list[hsxfer.Ticket] = []

    shapes = {"hidden_states": (chunks[0].shape, "bfloat16")}

    def begin() -> None:
        tickets[:] = [sink.begin(None, shapes) for _ in chunks]
        company.call()

    def write() -> None:
        sink.write_many([(ticket, "hidden_states", 0, chunk) for ticket, chunk in zip(tickets, chunks, strict=True)])

    def finish(verify: bool = False) -> None:
        company.send_away()
        handles = [ticket.commit() for ticket in tickets]
        sink.flush()
        for handle, chunk in zip(handles, chunks, strict=True):
            with source.get(handle) as sample:
                assert not verify or same_bytes(sample["hidden_states"], chunk)

    with store(2 * whole.nbytes) as (sink, source), Company(kind) as company:
        begin()
        write()
        finish(verify=True)
        name = f"caller: write_many of {num}, per request, {kind}"
        measure(name, write, before=begin, after=finish, rounds=200, per=num, cpu=True)


@pytest.mark.parametrize("call", ["begin", "commit"])
def test_ticket(measure: Measure, quick: bool, call: str) -> None:
    tensor = random_rows(1 << 16)
    shapes = {"hidden_states": (tensor.shape, "bfloat16")}
    tickets: list[hsxfer.Ticket] = []

    def begin() -> None:
        tickets.append(sink.begin(None, shapes))

    def write() -> None:
        tickets[-1].write("hidden_states", 0, tensor)

    def commit() -> None:
        tickets[-1].commit()

    def take() -> None:
        with source.get(tickets.pop().handle) as sample:
            assert same_bytes(sample["hidden_states"], tensor)

    with store(4 * tensor.nbytes) as (sink, source):
        if call == "begin":
            measure("caller: begin", begin, after=lambda: (write(), commit(), take()), rounds=1000, warmup=20, cpu=True)
        else:
            measure(
                "caller: commit",
                commit,
                before=lambda: (begin(), write()),
                after=take,
                rounds=1000,
                warmup=20,
                cpu=True,
            )


def test_token_ids(measure: Measure, quick: bool) -> None:
    """An engine has them as a list of ints; the handle holds their hash, the sample the ids."""
    num = 64 if quick else 32_768
    tensor, token_ids = random_rows(num * 64, 32), list(range(num))
    shapes = {"hidden_states": (tensor.shape, "bfloat16")}
    tickets: list[hsxfer.Ticket] = []

    def begin() -> None:
        tickets.append(sink.begin(None, shapes, token_ids=token_ids))

    def take() -> None:
        ticket = tickets.pop()
        ticket.write("hidden_states", 0, tensor)
        with source.get(ticket.commit()) as sample:
            assert sample.token_ids.tolist() == token_ids

    with store(4 * tensor.nbytes) as (sink, source):
        measure("caller: begin with a list of 32,768 token ids", begin, after=take, rounds=200, warmup=5, cpu=True)

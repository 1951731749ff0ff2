"""The other process: a consumer that is told over a pipe what to take, and answers when it had it and what it was."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

import hsxfer


@contextmanager
def peer(url: str) -> Iterator[Connection]:
    """Clocks of both processes agree: perf_counter is the machine's monotonic clock on Linux."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, url), daemon=True)
    process.start()
    there.close()
    try:
        yield here
        here.send(("stop",))
        process.join(30)
    finally:
        process.kill()
        here.close()


def serve(pipe: Connection, url: str) -> None:
    with hsxfer.open_source(url) as source:
        while (message := pipe.recv())[0] != "stop":
            pipe.send(_COMMANDS[message[0]](pipe, source, *message[1:]))


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy())


def read_all(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int64).sum())


def _take(pipe: Connection, source: hsxfer.Source, read: bool, verify: bool) -> tuple[float, Any]:
    """A handle's JSON comes next over the pipe."""
    with source.get(pipe.recv_bytes()) as sample:
        tensor = sample["hidden_states"]
        if read:
            read_all(tensor)
        return time.perf_counter(), checksum(tensor) if verify else None


def _take_lists(pipe: Connection, source: hsxfer.Source, form: str, read: bool, verify: bool) -> tuple[float, Any]:
    """Nested lists of floats come next over the pipe, pickled or as JSON."""
    received = pipe.recv_bytes()
    lists = json.loads(received) if form == "json" else pickle.loads(received)
    tensor = torch.tensor(lists, dtype=torch.bfloat16)
    if read:
        read_all(tensor)
    return time.perf_counter(), checksum(tensor) if verify else None


def _wait_for(pipe: Connection, source: hsxfer.Source, handle: str) -> tuple[float, Any]:
    """The handle of a sample not yet written: waits as a consumer does that was early."""
    with source.get(handle) as sample:
        tensor = sample["hidden_states"]
        return time.perf_counter(), checksum(tensor)


def _wait_for_word(pipe: Connection, source: hsxfer.Source) -> tuple[float, Any]:
    word = pipe.recv_bytes()
    return time.perf_counter(), word


def _stream(pipe: Connection, source: hsxfer.Source, num: int, options: dict[str, Any]) -> tuple[float, Any]:
    """Handles come over the pipe, one a message; the first bytes of every tensor are looked at."""
    sums = 0
    for _ in range(num):
        with source.get(pipe.recv_bytes(), **options) as sample:
            sums += int(sample["hidden_states"].view(torch.int16)[0, 0])
    return time.perf_counter(), sums


def _stream_bytes(pipe: Connection, source: hsxfer.Source, num: int) -> tuple[float, Any]:
    sums = 0
    for _ in range(num):
        sums += int(torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=torch.int16)[0])
    return time.perf_counter(), sums


_COMMANDS = {
    "take": _take,
    "take lists": _take_lists,
    "wait for": _wait_for,
    "wait for word": _wait_for_word,
    "stream": _stream,
    "stream bytes": _stream_bytes,
}

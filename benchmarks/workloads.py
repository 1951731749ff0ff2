"""What is sent: bytes of the shapes that engines have, and stores to send them through."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import hsxfer

WIDTH = 4096
ROW_BYTES = 2 * WIDTH  # bfloat16
_numbers = itertools.count()

Tensors = Mapping[str, torch.Tensor]


def random_rows(num_bytes: int, width: int = WIDTH) -> torch.Tensor:
    """bfloat16 `[rows, width]` of random bits; fewer bytes than a row make one narrower row."""
    width = min(width, num_bytes // 2)
    words = torch.empty(num_bytes // 8, dtype=torch.int64).random_()
    return words.view(torch.bfloat16).view(-1, width)


def tensors_of(what: str, quick: bool) -> Tensors:
    """The samples of `rows.WRITES` that one `put` sends."""
    name, size = what.split(", ")
    num_bytes = int(size.split()[0]) << (13 if quick else 20)
    if name == "one tensor":
        return {"hidden_states": random_rows(num_bytes)}
    if name == "four tensors":
        return {f"layer_{i}": random_rows(num_bytes // 4) for i in range(4)}
    wide = random_rows(num_bytes, 4 * WIDTH)
    return {f"layer_{i}": wide[:, i * WIDTH : (i + 1) * WIDTH] for i in range(4)}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By bits: NaNs are equal to themselves here."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


class SharedMemory:
    """Warm shared memory of the kind that an arena is made of: where the baseline copies to."""

    def __init__(self, num_bytes: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self.view = (ctypes.c_char * num_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self.view)
        ctypes.memset(self.address, 1, num_bytes)

    def memmove(self, source: torch.Tensor) -> None:
        ctypes.memmove(self.address, source.data_ptr(), source.nbytes)


def memmove_to_new(source: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(source)
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return target


@contextmanager
def new_store(num_bytes: int, **options: Any) -> Iterator[str]:
    """The URL of a store of this process's own, with room for `num_bytes`; what is left of it is removed."""
    name = f"bench-{os.getpid()}-{next(_numbers)}"
    text = "".join(f"&{name}={value}" for name, value in options.items())
    try:
        yield f"shm://{name}?capacity={num_bytes}{text}"
    finally:
        shutil.rmtree(f"/dev/shm/hsxfer-{os.geteuid()}-{name}", ignore_errors=True)


@contextmanager
def store(num_bytes: int, **options: Any) -> Iterator[tuple[hsxfer.Sink, hsxfer.Source]]:
    with (
        new_store(num_bytes, **options) as url,
        hsxfer.open_sink(url) as sink,
        hsxfer.open_source(sink.store) as source,
    ):
        yield sink, source

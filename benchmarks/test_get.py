"""From a handle to a tensor: zero-copy at any size, copies, digests, the join of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import hsxfer

from .measure import Measure
from .rows import GET_SIZES
from .workloads import SharedMemory, memmove_to_new, new_store, random_rows, same_bytes, store

MANY = 60_000  # consumers, so that one sample serves every round
SIZE = 64 << 20

FORMS: dict[str, Callable[[hsxfer.Handle], Any]] = {
    "a Handle": lambda handle: handle,
    "JSON": lambda handle: handle.to_json(),
    "a key": lambda handle: handle.key,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", GET_SIZES)
def test_zero_copy(measure: Measure, quick: bool, size: str, form: str) -> None:
    tensor = random_rows(min(GET_SIZES[size], 1 << 16) if quick else GET_SIZES[size])
    samples: list[hsxfer.Sample] = []

    def get() -> None:
        sample = source.get(what)
        samples.append(sample)
        sample["hidden_states"]

    with store(tensor.nbytes) as (sink, source):
        what = FORMS[form](sink.put({"hidden_states": tensor}, consumers=MANY))
        with source.get(what) as sample:
            assert same_bytes(sample["hidden_states"], tensor)
        del sample
        measure(
            f"get: {size} from {form}",
            get,
            after=lambda: samples.pop().release(),
            rounds=1000,
            warmup=20,
            cpu=True,
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("get: 64 MiB, copy=True, verify=False", {"copy": True, "verify": False}),
        ("get: 64 MiB, copy=True, digests checked", {"copy": True}),
        ("get: 64 MiB, zero-copy, verify=True", {"verify": True}),
    ],
)
def test_bytes_touched(measure: Measure, quick: bool, name: str, options: dict[str, Any]) -> None:
    tensor = random_rows(SIZE >> 10 if quick else SIZE)
    memory = SharedMemory(tensor.nbytes)
    baseline = (lambda: memmove_to_new(tensor)) if "copy" in options else (lambda: memory.memmove(tensor))
    with store(tensor.nbytes) as (sink, source):
        handle = sink.put({"hidden_states": tensor}, consumers=MANY)
        with source.get(handle, **options) as sample:
            assert same_bytes(sample["hidden_states"], tensor)
        measure(
            name,
            lambda: source.get(handle, **options)["hidden_states"],
            baseline=baseline,
            num_bytes=tensor.nbytes,
            rounds=25,
        )


def test_join(measure: Measure, quick: bool) -> None:
    """Two ranks write their halves of every chunk; the consumer gets one tensor, digests checked."""
    tensor = random_rows(SIZE >> 10 if quick else SIZE)

    def shard(index: int) -> hsxfer.Sink:
        return hsxfer.open_sink(url, hsxfer.Rank(tp=(index, 2)), policy="shard", instance="bench")

    with new_store(tensor.nbytes) as url, shard(0) as one, shard(1) as other, hsxfer.open_source(one.store) as source:
        handle, _ = (sink.put({"hidden_states": tensor}, key="joined", consumers=MANY) for sink in (one, other))
        with source.get(handle) as sample:
            assert same_bytes(sample["hidden_states"], tensor)
        measure(
            "get: 64 MiB joined from two ranks' shards",
            lambda: source.get(handle)["hidden_states"],
            baseline=lambda: memmove_to_new(tensor),
            num_bytes=tensor.nbytes,
            rounds=25,
        )

"""`SampleDataset`: order, sharing among workers, errors, what is held and for how long."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hsxfer
from hsxfer import ConfigError, SampleFailed, SampleLost
from hsxfer.data import SampleDataset

ROWS, WIDTH = 5, 3


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"shm://data?capacity=1MiB&dir={tmp_path}"


@pytest.fixture
def sink(url: str) -> Iterator[hsxfer.Sink]:
    with hsxfer.open_sink(url) as sink:
        yield sink


def fill(sink: hsxfer.Sink, count: int) -> list[hsxfer.Handle]:
    """Samples whose values and token ids are their number."""
    return [
        sink.put({"x": np.full((ROWS, WIDTH), number, "float32")}, key=f"k{number}", token_ids=[number] * ROWS)
        for number in range(count)
    ]


def value(sample: dict) -> int:
    assert tuple(sample["x"].shape) == (ROWS, WIDTH)
    assert (sample["x"] == sample["token_ids"][:, None]).all()
    return int(sample["x"][0, 0])


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_yields_copies_in_order_and_gives_the_memory_back(sink: hsxfer.Sink, url: str) -> None:
    dataset = SampleDataset(url, fill(sink, 10), framework="numpy")
    samples = list(dataset)
    assert [value(sample) for sample in samples] == list(range(10))
    assert [sample["key"] for sample in samples] == [f"k{number}" for number in range(10)]
    assert all(sample["x"].flags.writeable for sample in samples)
    assert sink.stats()["used_bytes"] == 0


def test_a_transform_gets_the_sample_without_a_copy(sink: hsxfer.Sink, url: str) -> None:
    handles = fill(sink, 3)
    dataset = SampleDataset(url, handles, transform=lambda sample: sample["x"], framework="numpy")
    views = list(dataset)
    assert [int(view[0, 0]) for view in views] == [0, 1, 2]
    assert not any(view.flags.writeable for view in views)
    assert sink.stats()["used_bytes"] > 0, "a view keeps its place"
    del views
    wait_until(lambda: sink.stats()["used_bytes"] == 0, "the last view's death gives it back")


def test_an_error_is_raised_at_its_sample(sink: hsxfer.Sink, url: str) -> None:
    first, second = fill(sink, 2)
    failed = sink.begin("bad", {"x": ((ROWS, WIDTH), "float32")}).abort("the engine gave up")
    iterator = iter(SampleDataset(url, [first, failed, second], framework="numpy"))
    assert value(next(iterator)) == 0
    with pytest.raises(SampleFailed, match="the engine gave up"):
        next(iterator)


def test_on_error_is_told_and_the_loop_goes_on(sink: hsxfer.Sink, url: str) -> None:
    handles = fill(sink, 4)
    failed = sink.begin("bad", {"x": ((ROWS, WIDTH), "float32")}).abort("the engine gave up")
    with hsxfer.open_source(url) as source:
        source.get(handles[1], framework="numpy").release()
    told = []
    dataset = SampleDataset(
        url,
        [*handles[:2], failed, *handles[2:]],
        on_error=lambda handle, error: told.append((handle.key, type(error))),
        framework="numpy",
    )
    assert [value(sample) for sample in dataset] == [0, 2, 3]
    assert told == [("k1", SampleLost), ("bad", SampleFailed)]


def test_a_sample_does_not_wait_for_the_next_handle(sink: hsxfer.Sink, url: str) -> None:
    """As in a loop where the next prompt depends on what was learnt from this one."""
    handles = fill(sink, 2)
    asked = threading.Event()

    def stream() -> Iterator[hsxfer.Handle]:
        yield handles[0]
        assert asked.wait(10), "the first sample was held back"
        yield handles[1]

    iterator = iter(SampleDataset(url, stream(), framework="numpy"))
    assert value(next(iterator)) == 0
    asked.set()
    assert value(next(iterator)) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_the_stream_of_handles_raises_is_raised(sink: hsxfer.Sink, url: str) -> None:
    (handle,) = fill(sink, 1)

    def stream() -> Iterator[hsxfer.Handle]:
        yield handle
        raise OSError("the connection broke")

    iterator = iter(SampleDataset(url, stream(), framework="numpy"))
    assert value(next(iterator)) == 0
    with pytest.raises(OSError, match="the connection broke"):
        next(iterator)


def test_stopping_early_ends_the_thread_and_leaves_the_rest_unread(sink: hsxfer.Sink, url: str) -> None:
    handles = fill(sink, 20)
    iterator = iter(SampleDataset(url, handles, depth=2, framework="numpy"))
    assert value(next(iterator)) == 0
    iterator.close()
    wait_until(lambda: all(thread.name != "hsxfer-fetch" for thread in threading.enumerate()), "the thread ends")
    assert sink.stats()["num_unread"] >= 20 - 5, "one yielded, two fetched, one offered, one under way at most"


def test_a_queue_ends_with_none(sink: hsxfer.Sink, url: str) -> None:
    handles: queue.Queue = queue.Queue()
    for handle in [*fill(sink, 3), None]:
        handles.put(handle)
    assert [value(sample) for sample in SampleDataset(url, handles, framework="numpy")] == [0, 1, 2]


def test_depth_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="depth 0"):
        SampleDataset("shm://x", [], depth=0)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers_share_the_handles(sink: hsxfer.Sink, url: str, start: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    handles = [handle.to_json() for handle in fill(sink, 12)]
    dataset = SampleDataset(url, handles)
    loader = data.DataLoader(dataset, batch_size=2, collate_fn=list, num_workers=2, multiprocessing_context=start)
    batches = list(loader)
    assert sorted(value(sample) for batch in batches for sample in batch) == list(range(12))
    assert sink.stats()["used_bytes"] == 0


def test_the_iterable_dataset_of_torch_includes_it() -> None:
    data = pytest.importorskip("torch.utils.data")
    assert isinstance(SampleDataset("shm://x", []), data.IterableDataset)

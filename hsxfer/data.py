"""Samples for a training loop: a dataset over handles, for a plain `for` or for torch's DataLoader.

```python
from torch.utils.data import DataLoader
from hsxfer.data import SampleDataset

dataset = SampleDataset("shm://spec-train", handles)  # a list of handles, a generator that follows a file, a queue
for batch in DataLoader(dataset, batch_size=8, collate_fn=list, num_workers=2):
    for sample in batch:
        sample["hidden_states"], sample["token_ids"]  # torch tensors [rows, width] and int64 [rows]
```

A transform sees the zero-copy `Sample` and decides what to keep of it:

```python
SampleDataset(url, handles, transform=lambda sample: sample["hidden_states"].float())
```
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from .errors import ConfigError, HsxferError
from .prefetch import Prefetcher
from .sample import Sample
from .source import HandleLike, open_source

T = TypeVar("T")


def as_tensors(sample: Sample) -> dict[str, Any]:
    """`{"key": ..., name: tensor, "token_ids": tensor or None}`, the tensors those of the sample."""
    return {"key": sample.handle.key, **{name: sample[name] for name in sample}, "token_ids": sample.token_ids}


class SampleDataset(Generic[T]):
    """Iterates over the samples that `handles` name, in their order, `depth` of them fetched ahead in a thread.

    Each iteration opens the store for itself, in the process and DataLoader worker that it runs in. Workers share the
    work: of an iterable every n-th handle is a worker's, from a queue (anything with `get`; one `None` a worker ends it)
    each takes the next. Every handle is read once; what is fetched ahead when a loop ends early counts as read.

    `transform(sample)` makes what is yielded; a view of the sample's memory keeps that memory from being used again for as
    long as it lives. Without a transform samples are copied, their digests checked, and `as_tensors` of them is yielded.

    `on_error(handle, error)` is told of a sample that cannot be had (failed, lost, late, damaged), and the loop goes on
    without it; when it is None, the error is raised. `names`, `framework`, `timeout_s` and `verify` as for `Source.get`.
    """

    def __init__(
        self,
        url: str,
        handles: Iterable[HandleLike] | Any,
        *,
        transform: Callable[[Sample], T] | None = None,
        on_error: Callable[[HandleLike, HsxferError], None] | None = None,
        depth: int = 4,
        **options: Any,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"depth {depth} is not at least 1")
        self.url = url
        self.handles = handles
        self.depth = depth
        self._transform = transform
        self._on_error = on_error
        self._options = {"copy": transform is None, **options}
        if options.get("framework", "torch") == "torch":
            _register_with_torch()

    def __iter__(self) -> Iterator[T]:
        transform: Callable[[Sample], Any] = self._transform or as_tensors
        with open_source(self.url) as source:
            ahead = Prefetcher(
                lambda handle: source.get(handle, **self._options), _worker_share(self.handles), self.depth
            )
            for handle, future in ahead:
                try:
                    sample = future.result()
                except HsxferError as error:
                    if self._on_error is None:
                        raise
                    self._on_error(handle, error)
                    continue
                del future
                sample.used_here()  # not on the stream of the thread that fetched it
                with sample:
                    yield transform(sample)
                del sample


def _worker_share(handles: Any) -> Iterator[HandleLike]:
    if hasattr(handles, "get") and not isinstance(handles, dict):
        return iter(handles.get, None)
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    if worker is None:
        return iter(handles)
    return itertools.islice(handles, worker.id, None, worker.num_workers)


def _register_with_torch() -> None:
    """DataLoader tells an iterable dataset by its class, and nothing here may import torch before it is needed."""
    try:
        from torch.utils.data import IterableDataset
    except ImportError:
        return  # `get` will say what is missing
    IterableDataset.register(SampleDataset)

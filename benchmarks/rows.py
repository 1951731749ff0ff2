"""The table of what is measured, against what, and what it must reach. Every row is published, also the ones that miss."""

from __future__ import annotations

from typing import NamedTuple

SCALE = {"s": 1.0, "ms": 1e3, "us": 1e6}


class Target(NamedTuple):
    """`figure`: "ratio" (baseline time / our time, pair by pair), "median" or "p99" in the row's unit."""

    figure: str
    op: str
    limit: float

    def met(self, value: float) -> bool:
        return value >= self.limit if self.op == ">=" else value <= self.limit


class Row(NamedTuple):
    name: str
    unit: str
    baseline: str | None = None
    targets: tuple[Target, ...] = ()


MEMCPY = "memmove of the same bytes into warm shared memory"
FRESH = "memmove of the same bytes into a new tensor"
LISTS = "tolist + pickle + pipe + unpickle + torch.tensor"
JSON = "tolist + json.dumps + pipe + json.loads + torch.tensor"
PIPE_BYTES = "the same bytes through a pipe"
PIPE_WORD = "8 bytes through a pipe to a waiting process"

WRITES = (
    *("one tensor, 64 MiB", "one tensor, 256 MiB", "four tensors, 256 MiB", "four strided slices, 256 MiB"),
    *("64 requests x 512 tokens", "512 requests x 16 tokens"),
)
PUT_SIZES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
GET_SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
COMPANY = ("alone", "beside a busy thread")

_CALLER = (Target("median", "<=", 50), Target("p99", "<=", 200))


def _rows() -> list[Row]:
    rows = [
        Row(f"write: {what}, digest {digest}", "ms", MEMCPY, (Target("ratio", ">=", limit),))
        for what in WRITES
        for digest, limit in (("off", 0.9), ("on", 0.75))
    ]
    rows.append(Row("write: one tensor, 64 MiB, first pass through a new arena", "ms", MEMCPY))
    rows += [Row(f"caller: put of {size}, {company}", "us", None, _CALLER) for company in COMPANY for size in PUT_SIZES]
    rows += [
        Row(f"caller: write_many of {num}, per request, {company}", "us", None, (Target("median", "<=", 5),))
        for company in COMPANY
        for num in (64, 512)
    ]
    rows += [Row(f"caller: {call}", "us") for call in ("begin", "commit", "begin with a list of 32,768 token ids")]
    rows += [
        Row(f"get: {size} from {form}", "us", None, (Target("median", "<=", limit),))
        for form, limit in (("a Handle", 50), ("JSON", 100), ("a key", 100))
        for size in GET_SIZES
    ]
    rows += [
        Row("get: 64 MiB, copy=True, verify=False", "ms", FRESH),
        Row("get: 64 MiB, copy=True, digests checked", "ms", FRESH),
        Row("get: 64 MiB, zero-copy, verify=True", "ms", MEMCPY),
        Row("get: 64 MiB joined from two ranks' shards", "ms", FRESH),
    ]
    rows += [
        Row("way: 64 MiB of bfloat16 to another process", "ms", LISTS, (Target("ratio", ">=", 1000),)),
        Row("way: the same, every byte read there", "ms", LISTS),
        Row("way: the same, CPU time of the sending process", "ms", LISTS),
        Row("way: 64 MiB of bfloat16, against JSON", "ms", JSON, (Target("ratio", ">=", 1000),)),
        Row("way: write and commit of 4 KiB to a waiting get in another process", "us", PIPE_WORD),
        Row("stream: 1 MiB samples through a 64 MiB arena", "us", PIPE_BYTES),
        Row("stream: the same, copied and checked by the consumer", "us", PIPE_BYTES),
        Row("open_sink with 1 GiB", "ms"),
    ]
    return rows


ROWS = {row.name: row for row in _rows()}

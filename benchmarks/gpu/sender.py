"""The way out of the GPU: beside one pinned copy of the same bytes, and what it takes of the caller's time and of the GPU's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import hsxfer

from .figures import ROWS, WIDTH, Figures, PinnedCopy, percentile, random_rows, same, take

PINNED = "one pinned copy of the same bytes, pair by pair"


def ways(figures: Figures, url: str, rounds: int) -> None:
    rows = random_rows(ROWS, WIDTH)
    quarter = WIDTH // 4
    planes = {f"layer.{i}": rows[:, i * quarter : (i + 1) * quarter].contiguous() for i in range(4)}
    wide = torch.cat([rows, rows[:, :4096]], 1)
    pinned = PinnedCopy(rows.numel() * 2)
    medians: dict[str, dict[str, float]] = {}
    for digest in ("on", "off"):
        with (
            hsxfer.open_sink(f"{url}?capacity=3GiB&slots=4096&digest={digest}") as sink,
            hsxfer.open_source(url) as source,
        ):
            puts: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
                "one plane": ({"x": rows}, rows),
                "four planes": (planes, planes["layer.3"]),
                "strided slice of a wider tensor": ({"x": wide[:, :WIDTH]}, rows),
            }
            for name, (tensors, last) in puts.items():
                handle = sink.put(tensors)
                with source.get(handle, verify=True) as sample:
                    assert same(sample[list(tensors)[-1]], last), name

                def one(tensors: dict[str, Any] = tensors) -> Any:
                    handle = sink.put(tensors)
                    sink.flush()
                    return handle

                ratios, ours = _pairs(pinned, None, one, lambda handle: take(source, handle), rounds)
                medians.setdefault(name, {})[digest] = ours
                gb_s = rows.numel() * 2 / ours / 1e9
                label = f"805 MB, {name}, digest {digest}"
                figures.add(label, ratios, "ratio", PINNED, ">=", 0.97, median_ms=ours * 1e3, gb_per_s=gb_s)
            for requests, tokens, target in ((64, 512, 0.95), (512, 16, 0.85)):
                num_bytes = requests * tokens * WIDTH * 2
                parts = rows[: requests * tokens].split(tokens)
                calls: list[float] = []
                ratios = []
                for number in range(rounds + 2):
                    tickets = [sink.begin(None, {"x": ((tokens, WIDTH), "bfloat16")}) for _ in parts]
                    writes = [(ticket, "x", 0, part) for ticket, part in zip(tickets, parts, strict=True)]
                    theirs = pinned.seconds(num_bytes)
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    sink.write_many(writes)
                    calls.append(time.perf_counter() - start)
                    sink.flush()
                    ratios.append(theirs / (time.perf_counter() - start))
                    for ticket, part in zip(tickets, parts, strict=True):
                        with source.get(ticket.commit(), verify=number == 0) as sample:
                            assert number or same(sample["x"], part)
                label = f"{requests} requests x {tokens} tokens, digest {digest}"
                figures.add(label, statistics.median(ratios[2:]), "ratio", PINNED, ">=", target)
                per = [1e6 * call / requests for call in calls[2:]]
                figures.add(
                    f"write_many of {requests}, digest {digest}, a request",
                    statistics.median(per),
                    "us",
                    "-",
                    "<=",
                    5.0,
                )
    for name, by_digest in medians.items():
        figures.add(
            f"digest's part of the way, {name}",
            by_digest["on"] / by_digest["off"] - 1,
            "",
            "the way without",
            "<=",
            0.05,
        )


def _pairs(
    pinned: PinnedCopy, num_bytes: int | None, ours: Callable[[], Any], after: Callable[[Any], None], rounds: int
) -> tuple[float, float]:
    ratios, times = [], []
    for _ in range(rounds + 2):
        theirs = pinned.seconds(num_bytes)
        torch.cuda.synchronize()
        start = time.perf_counter()
        handle = ours()
        times.append(time.perf_counter() - start)
        ratios.append(theirs / times[-1])
        after(handle)
    return statistics.median(ratios[2:]), statistics.median(times[2:])


def callers(figures: Figures, url: str, rounds: int) -> None:
    """An engine's thread is busy between two calls, so this one is, too: caches are its own then, and its core is awake."""
    with hsxfer.open_sink(f"{url}?capacity=12GiB&slots=4096") as sink, hsxfer.open_source(url) as source:
        for label, size in (("1 MB", 10**6), ("80 MB", 80 * 10**6), ("1 GB", 10**9)):
            for count in (1, 5):
                tensors = {f"t{i}": random_rows(size // count // (2 * 4096) + 1, 4096) for i in range(count)}
                times = []
                for _ in range(rounds):
                    busy_until = time.perf_counter() + 2e-3
                    while time.perf_counter() < busy_until:
                        pass
                    start = time.perf_counter()
                    handle = sink.put(tensors)
                    times.append(1e6 * (time.perf_counter() - start))
                    take(source, handle)
                name = f"put of {count} tensor{'s' * (count > 1)}, {label}"
                figures.add(f"{name}, median", statistics.median(times), "us", "-", "<=", 50.0)
                figures.add(f"{name}, p99", percentile(times, 0.99), "us", "-", "<=", 200.0)


def matmuls(figures: Figures, url: str) -> None:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rows = random_rows(ROWS, WIDTH)
    out = torch.empty_like(a)

    def compute() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        for _ in range(200):
            torch.mm(a, b, out=out)
        events[1].record()
        return events

    other = torch.cuda.Stream()
    slower = []
    with hsxfer.open_sink(f"{url}?capacity=3GiB") as sink, hsxfer.open_source(url) as source:
        for _ in range(5):
            alone = compute()
            torch.cuda.synchronize()
            beside = compute()
            num_sent = 0
            with torch.cuda.stream(other):
                while not beside[1].query():
                    take(source, sink.put({"x": rows}))
                    num_sent += 1
            torch.cuda.synchronize()
            slower.append(beside[0].elapsed_time(beside[1]) / alone[0].elapsed_time(alone[1]) - 1)
    figures.add(
        "8192 bf16 matmuls beside the stream, slower by",
        statistics.median(slower),
        "",
        "alone",
        "<=",
        0.02,
        num_sent=num_sent,
    )

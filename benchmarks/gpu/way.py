"""From a GPU tensor in one process to a GPU tensor in another, and a stream of such samples for a while."""

from __future__ import annotations

import statistics
import time

import torch

import hsxfer

from .consumer import Consumer, byte_sum
from .figures import ROWS, WIDTH, Figures, PinnedCopy, random_rows

BOTH_WAYS = "both directions of the bus at once, 49.6 GB/s: 16.2 ms"


def process_to_process(figures: Figures, url: str, rounds: int) -> None:
    rows = random_rows(ROWS, WIDTH)
    for digest, target in (("off", 17.3), ("on", 18.5)):
        with hsxfer.open_sink(f"{url}?capacity=3GiB&slots=4096&digest={digest}") as sink, Consumer(url) as consumer:
            times = []
            for number in range(rounds + 4):
                key = f"{'check' if number == 0 else 'time'}-{digest}-{number}"
                consumer.ask(key, digest == "on")
                time.sleep(0.02)  # it waits by then
                torch.cuda.synchronize()
                start = time.monotonic()
                sink.put({"x": rows}, key=key)
                landed, total = consumer.answer()
                assert number or total == byte_sum(rows)
                times.append(1e3 * (landed - start))
                sink.flush()
            figures.add(
                f"GPU to GPU, 805 MB, digest {digest}",
                *(statistics.median(times[4:]), "ms", BOTH_WAYS, "<=", target),
                best_ms=min(times[4:]),
            )


def sustained(figures: Figures, url: str, duration_s: float) -> None:
    """Samples of 80 MB, one after the other, into an arena of eight; the consumer takes each to its GPU."""
    rows = random_rows(3276, WIDTH)
    num_bytes = rows.numel() * 2
    pinned = PinnedCopy(num_bytes * 10)
    theirs = num_bytes * 10 / statistics.median(pinned.seconds() for _ in range(10))
    with hsxfer.open_sink(f"{url}?capacity=660MB&block_s=30") as sink, Consumer(url) as consumer:
        consumer.ask("warm", True)
        sink.put({"x": rows}, key="warm")
        consumer.answer()
        consumer.send("stream")
        num_sent = num_got = most = 0
        start = time.monotonic()
        while time.monotonic() < start + duration_s:
            consumer.send(f"s{num_sent}")
            sink.put({"x": rows}, key=f"s{num_sent}")
            num_sent += 1
            while num_sent - num_got > 6:
                end, _ = consumer.answer()
                num_got += 1
            most = max(most, sink.stats()["used_bytes"])
        while num_got < num_sent:
            end, _ = consumer.answer()
            num_got += 1
        sink.flush()
        failed = sink.stats()["num_failed"]
    assert most <= 660 * 10**6
    rate = num_sent * num_bytes / (end - start)
    figures.add(
        f"sustained, 80 MB samples for {duration_s:g} s, consumer attached",
        *(rate / theirs, "ratio", "pinned copy", ">=", 0.9),
        gb_per_s=rate / 1e9,
        num_samples=num_sent,
        num_lost=num_sent - num_got + failed,
        most_used_bytes=most,
    )

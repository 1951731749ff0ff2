"""The same prompts with stock sglang and with hsxfer: from the first prompt sent to the last tensor held.

Processor seconds spent on hidden states are those of a rank's process over the prompts with hidden states less those over
the same prompts without, as the kernel counts them: nothing is patched. Passes alternate between the servers, figures are
medians, and the cache of prefixes is emptied before each pass.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import hsxfer
from hsxfer.demo.server import CHUNK_TOKENS, Server

IN_FLIGHT = 8
MIN_REPEATS = 3
SETTLE_S = 0.3  # for what a rank does after its last reply
NUM_CHECKED = 4

Take = Callable[[bytes], torch.Tensor | None]


@dataclass
class Pass:
    """One time through all prompts. `cpu_s` a rank."""

    seconds: float
    reply_bytes: int
    rows: int
    cpu_s: list[float]


@dataclass
class Side:
    """A server with and without hidden states, repeat by repeat."""

    name: str
    without: list[Pass]
    with_states: list[Pass]

    def summary(self) -> dict[str, Any]:
        """Medians; `rows` the least. `hidden_s` and `hidden_cpu_s` (a rank): with hidden states less without, of the same repeat."""
        repeats = list(zip(self.with_states, self.without, strict=True))
        cpu_s = [[on - off for on, off in zip(with_.cpu_s, without.cpu_s, strict=True)] for with_, without in repeats]
        return {
            "seconds": median(one.seconds for one in self.with_states),
            "seconds_without": median(one.seconds for one in self.without),
            "hidden_s": spread([with_.seconds - without.seconds for with_, without in repeats]),
            "reply_bytes": median(one.reply_bytes for one in self.with_states),
            "rows": min(one.rows for one in self.with_states),
            "hidden_cpu_s": [spread(rank) for rank in zip(*cpu_s, strict=True)],
            "passes": {"with": list(map(asdict, self.with_states)), "without": list(map(asdict, self.without))},
        }


def compare(
    stock: Server, ours: Server, source: hsxfer.Source, prompts: list[list[int]], limit_s: float, stats_dir: Path
) -> dict[str, Any]:
    """Raises nothing for a difference: it is in the result, which is plain JSON. Repeats for `limit_s`, and three times at least.

    `stats_dir`: where our server's ranks keep their counters (`HSXFER_STATS_DIR`).
    """

    def take_ours(reply: bytes) -> torch.Tensor:
        with source.get(hsxfer.Handle.from_meta_info(json.loads(reply)), copy=True) as sample:
            states: torch.Tensor = sample["hidden_states"]
            return states

    checked = check_equal(stock, ours, take_ours, [prompt for prompt in prompts if len(prompt) <= CHUNK_TOKENS])
    sides = [(stock, take_stock, Side("stock", [], [])), (ours, take_ours, Side("hsxfer", [], []))]
    for server, take, _ in sides:
        run_pass(server, prompts, take)  # warm-up, not counted
    counted = counted_cpu_s(ours, prompts[0], stats_dir)
    began, first = time.monotonic(), False
    while len(sides[0][2].with_states) < MIN_REPEATS or time.monotonic() - began < limit_s:
        # Who comes first, and which of its passes, changes too: a pass behind another server's finds the processor's caches cold.
        for server, take, side in sides:
            for hidden_states in first, not first:
                passes = side.with_states if hidden_states else side.without
                passes.append(run_pass(server, prompts, take if hidden_states else None))
        sides.reverse()
        first = not first
    num_passes = len(sides[0][2].with_states)
    counts = zip(counted_cpu_s(ours, prompts[0], stats_dir), counted, strict=True)
    return {
        "hsxfer_counted_cpu_s": [(after - before) / num_passes for after, before in counts],
        "num_prompts": len(prompts),
        "num_tokens": sum(map(len, prompts)),
        "in_flight": IN_FLIGHT,
        "repeats": num_passes,
        "checked": checked,
        **{side.name: side.summary() for _, _, side in sides},
    }


def counted_cpu_s(server: Server, prompt: list[int], stats_dir: Path) -> list[float]:
    """Seconds of processor time that each rank has spent in hsxfer's hooks since its start, by its own count."""
    server.generate(prompt, False)  # an idle rank does not write its counters
    time.sleep(SETTLE_S)
    server.generate(prompt, False)
    return [json.loads(path.read_text())["cpu_s"] for path in sorted(stats_dir.glob("*.json"))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and half the interquartile range."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "spread": (high - low) / 2}


def take_stock(reply: bytes) -> torch.Tensor:
    """What a trainer does with lists of floats: parse them, and make a tensor."""
    return torch.tensor(json.loads(reply)["meta_info"]["hidden_states"][0], dtype=torch.bfloat16)


def run_pass(server: Server, prompts: list[list[int]], take: Take | None) -> Pass:
    def one(prompt: list[int]) -> tuple[int, int]:
        reply = server.generate(prompt, hidden_states=take is not None)
        states = take(reply) if take else None
        return len(reply), 0 if states is None else len(states)

    server.flush_cache()
    time.sleep(SETTLE_S)
    cpu, began = server.cpu_s(), time.monotonic()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        sizes = list(pool.map(one, prompts))
    seconds = time.monotonic() - began
    time.sleep(SETTLE_S)
    used = [after - before for after, before in zip(server.cpu_s(), cpu, strict=True)]
    return Pass(seconds, sum(size for size, _ in sizes), sum(rows for _, rows in sizes), used)


def check_equal(stock: Server, ours: Server, take_ours: Take, prompts: list[list[int]]) -> dict[str, Any]:
    """Some prompts one at a time, so that both servers compute the same batches: are the numbers the same, bit for bit?"""
    prompts = prompts[:NUM_CHECKED]
    stock.flush_cache()
    equal = 0
    for prompt in prompts:
        theirs, mine = take_stock(stock.generate(prompt, True)), take_ours(ours.generate(prompt, True))
        equal += int(mine is not None and torch.equal(theirs, mine))
    return {"num_prompts": len(prompts), "num_rows": sum(map(len, prompts)), "num_equal": equal}

"""What the demo shows: a bar while it trains, a table at the end."""

from __future__ import annotations

import os
import platform
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text


class TrainingScreen:
    """A bar with the figures of the newest step; a line whenever the draft head was held to the prompts set aside."""

    def __init__(self, console: Console, steps: int) -> None:
        # Fits 80 columns.
        self._bar = Progress(
            *(BarColumn(10), MofNCompleteColumn(), TextColumn("{task.fields[figures]}")),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, figures="")
        self._console = console

    def __enter__(self) -> TrainingScreen:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, progress: dict[str, Any], totals: dict[str, float]) -> None:
        """`progress`: what the trainer told of a step. `totals`: samples_per_s, num_bytes and arena_use (0 to 1)."""
        step = int(progress["step"])
        moved = f"{totals['samples_per_s']:.0f} samples/s  {totals['num_bytes'] / 1e9:.3f} GB  arena {totals['arena_use']:.0%}"
        if "held_out_loss" in progress:
            loss = f"loss {progress['held_out_loss']:.3f}  top-1 {progress['held_out_agreement']:.1%}"
            self._bar.console.print(f"  step {step:>4}  {loss}  [dim]{moved}[/dim]", soft_wrap=True)
        if "loss" in progress:
            figures = f"loss {progress['loss']:.3f}  top-1 {progress['agreement']:.0%}  {moved}"
            self._bar.update(self._task, completed=step, figures=figures)


def show_comparison(console: Console, result: dict[str, Any]) -> None:
    """The table, and what was measured."""
    stock, ours = result["stock"], result["hsxfer"]
    table = Table(title="The same prompts with hidden states", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "stock sglang", "hsxfer", "ratio"):
        table.add_column(name, justify="right" if name else "left")

    def row(what: str, form: str, of: float, to: float) -> None:
        table.add_row(what, form.format(of), form.format(to), f"{of / to:,.1f}")

    def spread_row(what: str, of: dict[str, float], to: dict[str, float]) -> None:
        # A ratio to what is within its own noise of nothing would be noise.
        ratio = f"{of['median'] / to['median']:,.1f}" if to["median"] > 2 * to["spread"] else ""
        table.add_row(what, *(f"{one['median']:.2f} ± {one['spread']:.2f}" for one in (of, to)), ratio)

    row("seconds until the last tensor", "{:.2f}", stock["seconds"], ours["seconds"])
    spread_row("  of them for hidden states", stock["hidden_s"], ours["hidden_s"])
    for rank, (of, to) in enumerate(zip(stock["hidden_cpu_s"], ours["hidden_cpu_s"], strict=True)):
        spread_row(f"CPU seconds of rank {rank} for them", of, to)
    for rank, seconds in enumerate(result["hsxfer_counted_cpu_s"]):
        table.add_row(f"  of rank {rank}, in hsxfer's hooks", "", f"{seconds:.3f}", "")
    row("bytes of replies", "{:,.0f}", stock["reply_bytes"], ours["reply_bytes"])
    table.add_row("rows that arrived", f"{stock['rows']:,}", f"{ours['rows']:,}", f"of {result['num_tokens']:,}")
    console.print(table)
    checked = result["checked"]
    notes = [
        f"{result['num_prompts']} prompts of {result['num_tokens']:,} tokens, {result['in_flight']} in flight, hidden size "
        f"{result['hidden_size']}, {os.cpu_count()} {platform.machine()} cores. Medians of {result['repeats']} repeats "
        "that alternate between the servers, each with an empty cache.",
        "For hidden states: what the prompts take with them less what they take without, of the same repeat; CPU seconds are user "
        "and system time of the rank's whole process, and below it what the plugin's own clocks say. ± is half the range of the "
        "middle half of the repeats.",
        f"{checked['num_equal']} of {checked['num_prompts']} prompts sent one at a time to both servers gave the same hidden "
        "states, bit for bit.",
    ]
    if stock["rows"] < result["num_tokens"]:
        notes.append(
            f"Stock sglang left {result['num_tokens'] - stock['rows']:,} rows out, those of earlier chunks of a prompt that is "
            "computed in several: it did less than hsxfer."
        )
    for note in notes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 2)))

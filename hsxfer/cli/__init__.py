"""The command `hsxfer`. An error that hsxfer knows is one line and exit status 1; a wrong argument, 2."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hsxfer import ConfigError, HsxferError, __version__
from hsxfer.cli import health
from hsxfer.cli.stores import ArenaReport, age, arenas, parse_store, size
from hsxfer.config import StoreUrl

console = Console(highlight=False)


class Group(click.Group):
    """Turns `HsxferError` into a line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HsxferError as error:
            Console(stderr=True, highlight=False).print(Text(f"hsxfer: {error}", style="red"), soft_wrap=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hsxfer")
def main() -> None:
    """Hidden states out of an LLM inference engine and into a trainer."""


@main.command()
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A Hugging Face directory."
)
@click.option("--steps", type=click.IntRange(1), default=150, envvar="DEMO_STEPS", show_default=True)
@click.option(
    "--tp", type=click.IntRange(1), default=2, envvar="DEMO_TP", show_default=True, help="Ranks of the server."
)
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Samples a step.")
@click.option("--compare/--no-compare", default=True, help="Run stock sglang beside it at the end.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results there.")
def demo(model: Path | None, steps: int, tp: int, batch: int, compare: bool, json_path: Path | None) -> None:
    """Serve a small model with real sglang and train a draft head from its hidden states."""
    # Late and by name: nothing else here depends on the demo, or on what it needs.
    demonstration = importlib.import_module("hsxfer.demo.run")
    demonstration.run(demonstration.Plan(model, steps, tp, batch, compare, json_path), console)


@main.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--reclaim", is_flag=True, help="Remove what dead processes left behind.")
def doctor(as_json: bool, reclaim: bool) -> None:
    """Say what works here and what does not; exit status 1 if something does not."""
    removed = health.reclaim() if reclaim else None
    checks = health.examine(os.environ)
    healthy = all(check.status != health.BAD for check in checks)
    if as_json:
        told: dict[str, Any] = {"healthy": healthy, "checks": [check.to_dict() for check in checks]}
        if removed:
            told["reclaimed"] = {"files": removed[0], "bytes": removed[1]}
        click.echo(json.dumps(told, indent=2))
    else:
        styles = {health.OK: "green", health.WARNING: "yellow", health.BAD: "bold red"}
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for check in checks:
            table.add_row(
                Text(check.status, style=styles.get(check.status, "dim")), Text(check.name), Text(check.found)
            )
        console.print(table)
        if removed:
            console.print(f"removed {removed[0]} files, {size(removed[1])}")
    sys.exit(0 if healthy else 1)


@main.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True)
def inspect(store: str, as_json: bool) -> None:
    """Show the arenas of STORE, a name or a URL, without attaching to them."""
    url = parse_store(store)
    found = arenas(url)
    if as_json:
        click.echo(json.dumps({"store": str(url), "arenas": [arena.to_dict() for arena in found]}, indent=2))
        return
    if not found:
        raise HsxferError(f"{url} has no arena: no server uses it, or it is another user's")
    console.print(_arena_table(url, found))


@main.command()
@click.argument("store")
@click.option("--interval", type=click.FloatRange(0.05), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print once and end.")
def top(store: str, interval: float, once: bool) -> None:
    """Watch the arenas of STORE; Ctrl-C ends it."""
    url = parse_store(store)
    if once:
        console.print(_arena_table(url, arenas(url)))
        return
    try:
        with Live(_arena_table(url, arenas(url)), console=console, screen=console.is_terminal) as live:
            while True:
                time.sleep(interval)
                live.update(_arena_table(url, arenas(url)), refresh=True)
    except KeyboardInterrupt:
        pass


def _arena_table(url: StoreUrl, found: list[ArenaReport]) -> Table:
    """Fits 80 columns."""
    title = f"{url}, {len(found)} arena{'s' * (len(found) != 1)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("server", "rank", "state", "used", "of", "open", "unread", "failed", "reader", "age"):
        left = name in ("server", "rank", "state", "reader")
        table.add_column(name, justify="left" if left else "right", overflow="fold" if name == "server" else "ellipsis")
    for arena in found:
        style = {"alive": "green", "closed": "yellow"}.get(arena.state, "red")
        table.add_row(
            *(arena.instance, arena.rank, Text(arena.state, style=style)),
            *(f"{arena.used_bytes / arena.capacity_bytes:.0%}", size(arena.capacity_bytes)),
            *map(str, (arena.num_open, arena.num_unread, arena.num_failed)),
            *("yes" if arena.readers else "none", age(arena.age_s)),
        )
    return table


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def bench(pytest_arguments: tuple[str, ...]) -> None:
    """Measure: copies against memcpy, tolist and pickle. Further arguments go to pytest."""
    root = Path(__file__).parents[2]
    if not (root / "benchmarks").is_dir():
        raise HsxferError("the benchmarks are in hsxfer's repository, not in its package: run this in a checkout")
    command = [sys.executable, "-m", "pytest", "benchmarks", "-o", "addopts=-ra", "--benchmark-only", *pytest_arguments]
    sys.exit(subprocess.run(command, cwd=root, check=False).returncode)

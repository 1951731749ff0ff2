"""The demo's plot: two servers start, one feeds a trainer through shared memory, both answer the same prompts, all ends."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import hsxfer
from hsxfer.cli.stores import arenas, parse_store
from hsxfer.demo.feed import TrainerProcess
from hsxfer.demo.screen import TrainingScreen, show_comparison
from hsxfer.demo.server import DemoError, Server
from hsxfer.demo.text import find_model, load_prompts
from hsxfer.transports.shm import store_dir

IN_FLIGHT = 8
NUM_SET_ASIDE = 8
NUM_COMPARED = 48
CAPACITY = "8MiB"  # some fifty samples: the server waits for the trainer, not the other way round
COMPARE_S = 60.0
NEEDS = ("sglang", "torch", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Plan:
    """`model_dir` None: the target model of the checkout."""

    model_dir: Path | None
    steps: int
    tp: int
    batch: int
    compare: bool
    json_path: Path | None


def run(plan: Plan, console: Console) -> dict[str, Any]:
    """Everything that it starts is gone when it returns or raises. Raises `HsxferError` with what went wrong."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"the demo needs {', '.join(missing)}; in a checkout, make demo installs all of it")
    model_dir = plan.model_dir or find_model()
    if model_dir is None:
        raise hsxfer.ConfigError("no target model here: give --model, or run this in a checkout of hsxfer")
    began = time.monotonic()
    with _workplace() as logs, contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        url = f"shm://hsxfer-demo-{os.getpid()}"
        servers = _servers(plan, model_dir, logs, url, stack)
        console.print(f"starting sglang on {plan.tp} CPU rank{'s' * (plan.tp > 1)}, with hsxfer and without")
        prompts = load_prompts(model_dir)  # while they start: parsing the text takes seconds
        random.Random(0).shuffle(prompts)
        for server in servers:
            server.wait_ready()
        result: dict[str, Any] = {"plan": json.loads(json.dumps(asdict(plan), default=str))}
        result["start_s"] = time.monotonic() - began
        console.print(
            f"up after {result['start_s']:.0f} s; a draft head trains in another process, from {url}", soft_wrap=True
        )
        result["training"] = _train(plan, model_dir, logs, url, servers[0], prompts, console)
        if plan.compare:
            from hsxfer.demo.compare import compare

            console.print("the same prompts with stock sglang and with hsxfer, in turn")
            with hsxfer.open_source(url) as source:
                compared = compare(servers[1], servers[0], source, prompts[:NUM_COMPARED], COMPARE_S, logs / "stats")
            config = json.loads((model_dir / "config.json").read_text())
            result["comparison"] = {**compared, "hidden_size": config["hidden_size"]}
            show_comparison(console, result["comparison"])
    result["seconds"] = time.monotonic() - began
    console.print(f"done in {result['seconds']:.0f} s")
    if plan.json_path:
        plan.json_path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _servers(plan: Plan, model_dir: Path, logs: Path, url: str, stack: contextlib.ExitStack) -> list[Server]:
    """hsxfer's server and, for comparison, a stock one. Both start at once: each leaves a core idle half of the time."""
    store = parse_store(url)
    servers: list[Server] = []

    def stop() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of them
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.stop, servers))
        # What the ranks left unread, or could not close because they were killed.
        shutil.rmtree(store_dir(store), ignore_errors=True)

    stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
    stack.callback(stop)
    (logs / "stats").mkdir()
    sink = {"HSXFER_SINK": f"{url}?capacity={CAPACITY}", "HSXFER_STATS_DIR": str(logs / "stats")}
    kinds = {"hsxfer": sink, **({"stock": {}} if plan.compare else {})}
    for name, env in kinds.items():
        servers.append(Server(f"sglang ({name})", model_dir, plan.tp, logs / f"{name}.log", env))
    return servers


def _train(
    plan: Plan, model_dir: Path, logs: Path, url: str, server: Server, prompts: list[list[int]], console: Console
) -> dict[str, Any]:
    """Returns the trainer's figures at start and end, and what was moved."""
    store = parse_store(url)
    set_aside, for_training = prompts[:NUM_SET_ASIDE], prompts[NUM_SET_ASIDE:]
    order = [for_training[number % len(for_training)] for number in range(plan.steps * plan.batch)]
    history: list[dict[str, Any]] = []
    num_samples = num_bytes = 0
    totals: dict[str, float] = {}
    began = time.monotonic()
    with TrainerProcess(url, model_dir, plan.steps, plan.batch, logs / "trainer.log") as trainer:
        with trainer.feeding(server, set_aside, order, IN_FLIGHT), TrainingScreen(console, plan.steps) as screen:
            for progress in trainer.progress():
                if progress["step"] == 0:
                    began = time.monotonic()
                history.append(progress)
                num_samples += progress.get("num_samples", 0)
                num_bytes += progress.get("num_bytes", 0)
                found = arenas(store)
                totals = {
                    "samples_per_s": num_samples / max(time.monotonic() - began, 1e-9),
                    "num_bytes": num_bytes,
                    "arena_use": max((arena.used_bytes / arena.capacity_bytes for arena in found), default=0.0),
                }
                screen.show(progress, totals)
    if not history or history[-1]["step"] != plan.steps:
        raise DemoError(
            f"the trainer ended after {max(len(history) - 1, 0)} of {plan.steps} steps:\n{trainer.log_tail()}"
        )
    judged = [entry for entry in history if "held_out_loss" in entry]
    start, end = judged[0], judged[-1]
    console.print(
        f"on {len(set_aside)} prompts set aside: loss {start['held_out_loss']:.3f} -> {end['held_out_loss']:.3f}, "
        f"top-1 agreement with the target {start['held_out_agreement']:.1%} -> {end['held_out_agreement']:.1%}",
        soft_wrap=True,
    )
    return {**totals, "num_samples": num_samples, "seconds": time.monotonic() - began, "history": history}


@contextlib.contextmanager
def _workplace() -> Iterator[Path]:
    """A directory for logs; it stays, and is named, when something goes wrong."""
    logs, wanted = Path(tempfile.mkdtemp(prefix="hsxfer-demo-")), False
    try:
        yield logs
    except hsxfer.HsxferError as error:
        wanted = True
        raise DemoError(f"{error}\nlogs: {logs}") from error
    finally:
        if not wanted:
            shutil.rmtree(logs, ignore_errors=True)

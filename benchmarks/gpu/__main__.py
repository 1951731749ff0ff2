"""`python -m benchmarks.gpu [--quick] [--out FILE]`: every figure of the GPU path in one run, checked first, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from benchmarks import machine

from . import kernels, sender, way
from .figures import Figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", default=machine.commit(), help="where the checkout came without its history")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    rounds, url, figures = 3 if arguments.quick else 20, f"shm://bench-{os.getpid()}", Figures()
    torch.cuda.init()
    start = time.monotonic()
    sender.ways(figures, url, rounds)
    sender.callers(figures, url, 10 * rounds)
    sender.matmuls(figures, url)
    way.process_to_process(figures, url, rounds)
    kernels.kernels(figures)
    way.sustained(figures, url, 2 if arguments.quick else 20)
    if arguments.out:
        told = {
            "machine": {**machine.describe(), "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda},
            "driver": _driver(),
            "commit": arguments.commit,
            "versions": machine.versions(),
            "arguments": ["--quick"] if arguments.quick else [],
            "taken_s": round(time.monotonic() - start, 1),
            "figures": figures.rows,
        }
        arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    missed = [row["name"] for row in figures.rows if row.get("met") is False]
    print(f"{len(figures.rows)} figures, {len(missed)} short of their targets")


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("  ")[1].strip()
    except (OSError, IndexError):
        return None


if __name__ == "__main__":
    main()

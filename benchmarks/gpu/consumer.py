"""Another process with the same GPU: `python -m benchmarks.gpu.consumer URL`. Reads `KEY VERIFY` lines, answers when each has landed."""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

import torch

import hsxfer


class Consumer:
    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.consumer", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def ask(self, key: str, verify: bool) -> None:
        self.send(f"{key} {int(verify)}")

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> tuple[float, int]:
        """When it had landed, on CLOCK_MONOTONIC, and the sum of its bytes."""
        assert self._process.stdout is not None
        landed, total = self._process.stdout.readline().split()
        return float(landed), int(total)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def byte_sum(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.int16).sum(dtype=torch.int64))


def main(url: str) -> None:
    """Lines `KEY VERIFY`: one sample at a time. After a line `stream`, keys alone, two samples ahead of the answers."""
    torch.zeros(1, device="cuda")
    with hsxfer.open_source(url) as source:
        print("ready", flush=True)
        for line in sys.stdin:
            if line == "stream\n":
                for sample in source.prefetch((key.strip() for key in sys.stdin), device="cuda:0", depth=2):
                    print(time.monotonic(), len(sample), flush=True)
                    sample.release()
                return
            key, verify = line.split()
            with source.get(key, device="cuda:0", verify=verify == "1") as sample:
                landed = time.monotonic()
                total = byte_sum(sample["x"]) if key.startswith("check") else 0
            print(landed, total, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

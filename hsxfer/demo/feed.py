"""The trainer's process, and the threads that turn prompts into handles for it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hsxfer
from hsxfer.demo.server import DemoError, Server, die_with_parent

STALL_S = 90.0  # a first step on a busy machine takes ten


class TrainerProcess:
    """`python -m hsxfer.demo.trainer`; gone when the `with` ends."""

    def __init__(self, url: str, model_dir: Path, steps: int, batch: int, log: Path) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._told: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sent: list[Future[None]] = []
        command = [sys.executable, "-m", "hsxfer.demo.trainer", url, str(model_dir), str(steps), str(batch)]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to handle
                preexec_fn=die_with_parent,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def feeding(
        self, server: Server, set_aside: list[list[int]], prompts: list[list[int]], in_flight: int
    ) -> Iterator[None]:
        """Sends the prompts to the server, `in_flight` at a time, and their handles to the trainer as they come back."""

        def send(prompt: list[int]) -> None:
            reply = json.loads(server.generate(prompt, hidden_states=True))
            self._write(hsxfer.Handle.from_meta_info(reply).to_json())

        pool = ThreadPoolExecutor(in_flight, "feed")
        try:
            for _ in pool.map(send, set_aside):
                pass
            self._write("")
            self._sent = [pool.submit(send, prompt) for prompt in prompts]
            yield
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def progress(self) -> Iterator[dict[str, Any]]:
        """What the trainer tells, step by step, until it ends. Raises what went wrong with feeding it, or `DemoError`."""
        heard = time.monotonic()
        while True:
            try:
                told = self._told.get(timeout=0.5)
            except queue.Empty:
                self._check_sent()
                if time.monotonic() - heard > STALL_S:
                    raise DemoError(f"nothing from the trainer for {STALL_S:g} s:\n{self.log_tail()}") from None
                continue
            if told is None:
                return
            heard = time.monotonic()
            yield told

    def _check_sent(self) -> None:
        """Raises what a prompt met; once all are through, lets the trainer know that no more comes: it may have left some out."""
        for future in self._sent:
            if future.done() and not future.cancelled():
                future.result()
        if all(future.done() for future in self._sent):
            assert self._process.stdin is not None
            with self._lock, contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    @property
    def status(self) -> int | None:
        return self._process.returncode

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                pass  # it has ended: `progress` says so

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._told.put(json.loads(line))
        self._told.put(None)

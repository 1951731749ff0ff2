"""Real sglang servers for the tests: one at a time, because even an idle scheduler keeps its core busy."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from hsxfer.engines.sglang.counters import WRITE_EVERY_S

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "examples" / "target_model" / "model"
START_S = 240

ARGUMENTS: dict[str, Any] = {
    "model_path": str(MODEL),
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,
    "log_level": "warning",
}


@dataclass(frozen=True)
class Config:
    """A server: sglang's arguments over `ARGUMENTS`, environment variables, HTTP or an Engine in a process of its own."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    http: bool = False

    def all_arguments(self) -> dict[str, Any]:
        return {**ARGUMENTS, **self.arguments}

    def all_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HSXFER_", "SGLANG_"))}
        # One thread a rank: two on a model this small wait for each other, and for whatever else the machine does, 20 times as long.
        fixed = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        ranks = self.arguments.get("tp_size", 1)
        if ranks > 1:
            fixed["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
        return {**kept, **fixed, **self.environment}


class Server:
    """A running server. `generate` takes the fields of `/generate` and gives one reply, or a list of them for a batch."""

    def __init__(self, config: Config, directory: Path) -> None:
        self.config = config
        self.log = directory / f"{config.name}.log"
        self.stats_dir = Path(config.environment.get("HSXFER_STATS_DIR", directory))
        self._pool = ThreadPoolExecutor(32)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str]) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self.config.all_environment(), stdout=log, stderr=log, start_new_session=True
            )

    def check_alive(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(
                f"{self.config.name} ended with {self._process.returncode}: {self.log.read_text()[-4000:]}"
            )

    def wait(self, timeout_s: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def generate(self, **request: Any) -> Any:
        raise NotImplementedError

    def submit(self, **request: Any) -> Future[Any]:
        """`generate` in the background."""
        return self._pool.submit(self.generate, **request)

    def stats(self, label: str = "dp0-pp0-tp0", **until: Any) -> dict[str, Any]:
        """A rank's counters, once they say what `until` says; without it, those of a server that has nothing to do."""
        if not until:
            time.sleep(3 * WRITE_EVERY_S)
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(FileNotFoundError):
                stats = json.loads((self.stats_dir / f"{label}.json").read_text())
                flat = {**stats["sink"], **stats}
                if all(flat[name] == value for name, value in until.items()):
                    return stats
            if time.monotonic() > deadline:
                raise AssertionError(f"rank {label} never came to {until}: {flat}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class HttpServer(Server):
    """`python -m sglang.launch_server`."""

    def __init__(self, config: Config, directory: Path) -> None:
        super().__init__(config, directory)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        options = {**config.all_arguments(), "port": self.url.rpartition(":")[2], "skip_server_warmup": True}
        command = [sys.executable, "-m", "sglang.launch_server"]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)]
        self.start(command)

    def await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/model_info", timeout=5).close()
                return
            time.sleep(0.2)
        raise TimeoutError(self.log.read_text()[-4000:])

    def generate(self, **request: Any) -> Any:
        return json.loads(self.post("/generate", **request))

    def post(self, path: str, **request: Any) -> bytes:
        """Raises `RuntimeError` with sglang's own message for what it refuses."""
        body = json.dumps(request).encode()
        call = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(call, timeout=120) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as refused:
            raise RuntimeError(f"{refused.code}: {refused.read().decode()}") from None


class EngineServer(Server):
    """An Engine in a process of its own (`host.py`)."""

    def __init__(self, config: Config, directory: Path) -> None:
        super().__init__(config, directory)
        self._address = str(directory / f"{config.name}-{secrets.token_hex(4)}")
        self._listener = Listener(self._address, "AF_UNIX")
        self.start([sys.executable, str(HERE / "host.py"), self._address, json.dumps(config.all_arguments())])

    def await_ready(self) -> None:
        self._listener._listener._socket.settimeout(0.2)
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._connection = self._listener.accept()
                break
            except TimeoutError:
                self.check_alive()
                if time.monotonic() > deadline:
                    raise
        self.hooks: list[str] = self._connection.recv()

    def generate(self, **request: Any) -> Any:
        self._connection.send(("generate", request))
        good, result = self._connection.recv()
        if not good:
            raise RuntimeError(result)
        return result


class Servers:
    """`use(config)` gives that server, running; any other that runs is stopped first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: Server | None = None

    def use(self, config: Config) -> Any:
        if self._running is None or self._running.config is not config:
            self.stop()
            started = (HttpServer if config.http else EngineServer)(config, self._directory)
            self._running = started
            started.await_ready()
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    @contextlib.contextmanager
    def refused(self, config: Config) -> Iterator[str]:
        """A server that is expected not to come up: what it printed."""
        self.stop()
        started = HttpServer(config, self._directory) if config.http else EngineServer(config, self._directory)
        try:
            assert started.wait(START_S) != 0
            yield started.log.read_text()
        finally:
            started.stop()

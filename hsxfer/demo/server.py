"""A real sglang server on the CPU, as a process group that is gone when we say so."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsxfer.errors import HsxferError

START_S = 240.0  # without bytecode, on two busy cores
REPLY_S = 120.0
STOP_S = 15.0
CHUNK_TOKENS = 2048
_PR_SET_PDEATHSIG = 1
_SHM = re.compile(r"/dev/shm/(?!hsxfer-)\S+")


class DemoError(HsxferError):
    """What ends the demo; the message says what to look at."""


class Server:
    """`python -m sglang.launch_server` with its log in `log`. Chunked prefill and radix cache are on, as by default."""

    def __init__(self, name: str, model_dir: Path, tp: int, log: Path, extra_env: Mapping[str, str]) -> None:
        self.name = name
        self.tp = tp
        self.log = log
        self.port = _free_port()
        self._shm_files: set[str] = set()
        self.ranks: list[int] = []  # process ids of the scheduler ranks, in order
        arguments = {
            **{"model-path": str(model_dir), "tp": tp, "port": self.port, "device": "cpu", "dtype": "bfloat16"},
            **{"attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none"},
            **{"chunked-prefill-size": CHUNK_TOKENS, "max-total-tokens": 32768, "max-running-requests": 32},
        }
        switches = ["disable-cuda-graph", "skip-tokenizer-init", "skip-server-warmup", "enable-return-hidden-states"]
        # Else idle ranks poll, and processor seconds measure how long we waited.
        switches.append("sleep-on-idle")
        command = [sys.executable, "-m", "sglang.launch_server", *(f"--{switch}" for switch in switches)]
        command += [word for option, value in arguments.items() for word in (f"--{option}", str(value))]
        with log.open("wb") as file:
            # A group of its own: Ctrl-C comes to us alone, and `stop` reaches every child.
            self._process = subprocess.Popen(
                *(command,), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                env=_environment(tp, model_dir) | dict(extra_env), preexec_fn=die_with_parent,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Returns when the server answers. Raises `DemoError` with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None:
                raise DemoError(
                    f"{self.name} ended with status {self._process.returncode} at start:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise DemoError(f"{self.name} is not up after {START_S:g} s:\n{self.log_tail()}")
            time.sleep(0.25)
        tree = [self._process.pid, *_descendants(self._process.pid)]
        found = {_title(pid): pid for pid in tree}
        self.ranks = [found[title] for title in sorted(found) if title.startswith("sglang::scheduler")]
        if len(self.ranks) != self.tp:
            raise DemoError(f"{self.name} has scheduler processes {self.ranks}, {self.tp} expected")
        self._shm_files = {path for pid in tree for path in _SHM.findall(_read(f"/proc/{pid}/maps"))}

    def generate(self, token_ids: list[int], hidden_states: bool) -> bytes:
        """The reply's body, as it came. Thread-safe."""
        request = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_hidden_states": hidden_states,
        }
        return self._request("POST", "/generate", json.dumps(request).encode())

    def flush_cache(self) -> None:
        """Forgets every cached prefix: with one, stock sglang does not return the prefix's hidden states."""
        self._request("POST", "/flush_cache")

    def cpu_s(self) -> list[float]:
        """Seconds of processor time of each rank so far, user and system, all threads (proc(5))."""
        ticks = (_read(f"/proc/{pid}/stat").rpartition(")")[2].split() for pid in self.ranks)
        return [(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") for fields in ticks]

    def log_tail(self, lines: int = 25) -> str:
        # Some progress bars draw with carriage returns and nothing else.
        text = _read(str(self.log)).replace("\r", "\n").replace("\0", "")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])

    def stop(self) -> None:
        """Ends all its processes, and removes what sglang leaves in /dev/shm when it does so to itself."""
        children = _descendants(self._process.pid)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + STOP_S
        while any(os.path.exists(f"/proc/{pid}/exe") for pid in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        for path in self._shm_files:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        # One connection a request: the server closes those that were idle for some seconds, at any moment.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REPLY_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            reply = connection.getresponse()
            content: bytes = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise DemoError(f"{self.name} did not answer {path}: {error!r}\n{self.log_tail()}") from error
        finally:
            connection.close()
        if reply.status != 200:
            raise DemoError(f"{self.name} answered {path} with {reply.status}: {content[:300]!r}\n{self.log_tail()}")
        return content

    def _answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _environment(tp: int, model_dir: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HSXFER_")}
    cpus = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cpus[rank % len(cpus)]) for rank in range(tp))
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": binding if tp > 1 else ""}
    # One thread a rank: with more, ranks that share cores spin at OpenMP's barriers; 256 tokens took 500 ms instead of 20.
    env |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # No compiling at the first request, which takes 15 s, and no importing of 250 models that are not served: 2 s a process.
    return env | {"TORCHDYNAMO_DISABLE": "1", "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_models(model_dir))}


def _other_models(model_dir: Path) -> list[str]:
    """Modules of sglang's models that do not define the architecture of `model_dir`."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    architectures = json.loads((model_dir / "config.json").read_text())["architectures"]
    modules = (Path(sglang.origin).parent / "srt/models").glob("*.py")
    texts = {path.stem: path.read_text(errors="replace") for path in modules}
    return sorted(name for name, text in texts.items() if not any(f"class {arch}(" in text for arch in architectures))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    """Not one of those that the kernel hands out: a server binds its port a minute after it was told it."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DemoError("no free port between 20000 and 32000")


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        fields: Any = _read(f"/proc/{entry}/stat").rpartition(")")[2].split()
        if fields:
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found = list(parents.get(pid, []))
    for child in found:
        found += parents.get(child, [])
    return found


def _title(pid: int) -> str:
    return _read(f"/proc/{pid}/cmdline").split("\0")[0]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""

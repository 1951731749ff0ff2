"""Another Python process, driven by a test.

    peer = Peer()
    peer(lambda my, url: setattr(my, "source", hsxfer.open_source(url)), store)
    rows = peer(lambda my, handle: my.source.get(handle, framework="numpy")["x"].copy(), handle)

A function travels by its code, so it may use its arguments, the names that this file imports and defines, and `my`, a
namespace that lives in the other process. What it raises there is raised here.
"""

# ruff: noqa: F401 - imported for the functions that travel
from __future__ import annotations

import contextlib
import gc
import hashlib
import marshal
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hsxfer

PATIENCE_S = 60.0  # for a peer on a busy machine; what hangs ends here, with a message


class Peer:
    """A process of its own, started with exec; `prefix` is a command that starts it, such as `unshare`."""

    def __init__(self, *prefix: str) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that what it forks goes with it
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.start(function, *args, **kwargs)
        return self.result()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Does not wait for the answer; `result` does."""
        assert not function.__code__.co_freevars, (
            f"{function.__code__.co_freevars} do not travel: pass them as arguments"
        )
        _send(self._process.stdin, (marshal.dumps(function.__code__), function.__defaults__, args, kwargs))

    def result(self, timeout_s: float = PATIENCE_S) -> Any:
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert ready, f"the peer did not answer within {timeout_s:g} s"
        good, value = _receive(self._process.stdout)
        if good:
            return value
        raise value

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when the process, and what it forked with our pipe, are gone."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdout.read()  # before its input ends, or it could still close in order
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> int:
        """Lets the process end by itself; its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the peer did not end within a minute") from None


def fetch(my: Any, url: str, handle: Any, **options: Any) -> dict[str, Any]:
    """In the peer: gets a sample and returns what can be compared: `told` of each tensor, token ids, meta."""
    with source_of(my, url).get(handle, **options) as sample:
        ids = sample.token_ids
        return {
            **{name: told(sample[name]) for name in sample},
            "token_ids": None if ids is None else ids.tolist(),
            "meta": sample.meta,
        }


def in_child(my: Any, code: bytes) -> Any:
    """In the peer: runs code in a forked child; its result, or what it raised."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = (True, types.FunctionType(marshal.loads(code), globals())(my))
        except Exception as error:  # noqa: BLE001 - it is raised in the parent
            answer = (False, error)
        os.write(theirs, pickle.dumps(answer))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(mine, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    good, value = pickle.loads(data)
    if good:
        return value
    raise value


def source_of(my: Any, url: str) -> hsxfer.Source:
    """In the peer: one source per store."""
    sources = my.__dict__.setdefault("sources", {})
    if url not in sources:
        sources[url] = hsxfer.open_source(url)
    return sources[url]


def pattern(seed: int, shape: tuple[int, ...], dtype: str = "uint8") -> np.ndarray:
    """An array of random bits that `seed` determines, of any dtype that numpy or ml_dtypes has."""
    if dtype.startswith(("bfloat", "float8")):
        import ml_dtypes

        kind = np.dtype(getattr(ml_dtypes, dtype))
    else:
        kind = np.dtype(dtype)
    bits = np.random.default_rng(seed).integers(
        0, 2 if dtype == "bool" else 256, int(np.prod(shape)) * kind.itemsize, np.uint8
    )
    return bits.view(kind).reshape(shape)


def raw(tensor: Any) -> bytes:
    """A tensor's bytes in row-major order, from any framework."""
    if hasattr(tensor, "data_ptr"):
        import torch

        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.tobytes()


def told(tensor: Any) -> tuple[str, tuple[int, ...], str]:
    """dtype, shape and a hash of the bytes: what two processes compare."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), hashlib.blake2b(raw(tensor)).hexdigest()


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition()`; fails with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.002)
    return value


def _send(stream: Any, message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(struct.pack("=Q", len(data)) + data)
    stream.flush()


def _receive(stream: Any) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the peer is gone")
    return pickle.loads(stream.read(struct.unpack("=Q", head)[0]))


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    my = types.SimpleNamespace()
    names = globals()
    while True:
        try:
            code, defaults, args, kwargs = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = (True, types.FunctionType(marshal.loads(code), names, argdefs=defaults)(my, *args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it is raised on the other side
            answer = (False, error)
        _send(answers, answer)
        del answer, args, kwargs  # or they would keep samples alive until the next call


if __name__ == "__main__":
    _serve()

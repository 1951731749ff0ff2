"""What the tests of the native core share: the library through hsxfer._native, without the Python layers above it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from hsxfer import _native
from hsxfer._native import byref

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
LIB = _native.load().slow

FREE, OPEN, SEALED, READY, FAILED_STATE, RETIRED = range(6)
NEVER, CONSUMED, EXPIRED, CLOSED, RECYCLED = range(5)


class CoreError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"{code}: {LIB.hsx_last_error().decode()}")


def check(code: int) -> None:
    if code != _native.OK:
        raise CoreError(code)


class Producer:
    """An arena; samples are bytes. `digest` as docs/format.md, 5: one table behind the bytes of each sample, a row being `row` bytes."""

    def __init__(self, path, capacity=1 << 20, ttl_s=600.0, slots=0, region=0, driver="host") -> None:
        self.path = str(path)
        self.handle = ctypes.c_void_p()
        options = _native.ArenaOptions(
            self.path.encode(), driver.encode(), capacity, region, int(ttl_s * 1e6), slots, 0
        )
        check(LIB.hsx_arena_create(byref(options), byref(self.handle)))
        self.last = 0
        self.sources = []

    def begin(self, key, num_bytes=0, head=b"{}", payload=None, tail_capacity=256, consumers=1):
        slot = _native.Slot()
        payload = num_bytes if payload is None else payload
        spec = _native.SampleSpec(key, head, num_bytes, payload, len(key), len(head), tail_capacity, consumers)
        check(LIB.hsx_arena_begin(self.handle, byref(spec), byref(slot)))
        return slot

    def copy(self, slot, data, offset=0):
        self.sources.append(data)  # until it is copied; for `copies` the caller keeps them
        return self.copies([copy_of(slot, data, offset)])

    def copies(self, copies):
        array = (_native.Copy * len(copies))(*copies)
        number = ctypes.c_uint64()
        check(LIB.hsx_submit_copies(self.handle, array, len(copies), None, byref(number)))
        self.last = number.value
        return number.value

    def seal(self, slot, tail=b"{}", failed=False):
        number = ctypes.c_uint64()
        check(LIB.hsx_submit_seal(self.handle, slot, tail, len(tail), int(failed), byref(number)))
        self.last = number.value
        return number.value

    def put(self, key, data=b"", **options):
        slot = self.begin(key, len(data), **options)
        if data:
            self.copy(slot, data)
        self.seal(slot)
        self.wait()
        return slot

    def fail(self, key, tail=b'{"failed":"test"}', num_bytes=0):
        slot = self.begin(key, num_bytes)
        self.seal(slot, tail, failed=True)
        self.wait()
        return slot

    def wait(self, number=None, timeout_s=10.0):
        done = ctypes.c_uint64()
        check(LIB.hsx_wait_done(self.handle, (number or self.last) - 1, int(timeout_s * 1e6), byref(done)))
        if done.value >= self.last:
            self.sources.clear()
        return done.value

    def wait_space(self, timeout_s):
        check(LIB.hsx_arena_wait_space(self.handle, int(timeout_s * 1e6)))

    def data(self, slot):
        address, num_bytes = ctypes.c_void_p(), ctypes.c_uint64()
        check(LIB.hsx_arena_data(self.handle, slot, byref(address), byref(num_bytes)))
        return address.value, num_bytes.value

    def stats(self):
        stats = _native.Stats()
        check(LIB.hsx_arena_stats(self.handle, byref(stats)))
        return {name: getattr(stats, name) for name, _ in stats._fields_}

    def close(self):
        check(LIB.hsx_arena_close(self.handle))
        self.sources.clear()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Consumer:
    def __init__(self, path) -> None:
        self.handle = ctypes.c_void_p()
        self.held = []
        check(LIB.hsx_reader_open(str(path).encode(), byref(self.handle)))

    def lease(self, key, ack=True, timeout_s=0.0):
        """The lease; raises CoreError, with `.lease`, for anything but a ready sample."""
        lease = _native.Lease()
        code = LIB.hsx_lease_wait(self.handle, key, len(key), int(ack), int(timeout_s * 1e6), byref(lease))
        if code != _native.OK:
            error = CoreError(code)
            error.lease = lease
            if code == _native.FAILED:
                self.held.append(lease)
            raise error
        self.held.append(lease)
        return lease

    def code(self, key, ack=True, timeout_s=0.0):
        """(code, lease) of an attempt."""
        try:
            return _native.OK, self.lease(key, ack, timeout_s)
        except CoreError as error:
            return error.code, error.lease

    def release(self, lease):
        check(LIB.hsx_lease_release(self.handle, lease.slot, lease.generation))
        if lease in self.held:
            self.held.remove(lease)

    def take(self, key, timeout_s=5.0):
        """The sample's bytes, acknowledged and released."""
        lease = self.lease(key, True, timeout_s)
        data = bytes_of(lease)
        self.release(lease)
        return data

    def alive(self):
        alive, closed = ctypes.c_int(), ctypes.c_int()
        check(LIB.hsx_reader_alive(self.handle, byref(alive), byref(closed)))
        return bool(alive.value), bool(closed.value)

    def close(self):
        check(LIB.hsx_reader_close(self.handle))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        """Unlike close(): what is still leased is released first."""
        for lease in list(self.held):
            self.release(lease)
        self.close()


def copy_of(slot, data, offset=0, rows=1, digest=_native.NO_DIGEST, **fields):
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value if isinstance(data, bytes) else data
    row_bytes = fields.pop("row_bytes", len(data) // rows if isinstance(data, bytes) else 0)
    values = {"src_stride_bytes": row_bytes, "dst_stride_bytes": row_bytes, "digest_stride_bytes": 8, **fields}
    return _native.Copy(
        src=address, dst_offset=offset, row_bytes=row_bytes, num_rows=rows, digest_offset=digest, slot=slot, **values
    )


def bytes_of(lease):
    return ctypes.string_at(lease.data, lease.data_bytes)


def tail_of(lease):
    return ctypes.string_at(lease.tail, lease.tail_bytes)


def head_of(lease):
    return ctypes.string_at(lease.head, lease.head_bytes)


def probe(path):
    info = _native.ProbeInfo()
    check(LIB.hsx_probe(str(path).encode(), byref(info)))
    return {name: getattr(info, name) for name, _ in info._fields_}


def read_file(path):
    """From another process: to close an .ack file here would drop the locks that this process holds on it."""
    return subprocess.run(["cat", str(path)], check=True, capture_output=True).stdout


def until(condition, timeout_s=5.0, what="it"):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {timeout_s} s"
        time.sleep(0.005)


def spawn(script, *arguments, prefix=(), **options):
    """Runs Python source in a process of its own, with this module imported as `t`. Its stdin and stdout are pipes of text.
    `prefix`: a command that runs it."""
    source = f"import sys; sys.path.insert(0, {str(HERE)!r}); import native_tools as t\n" + script
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", source, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parents[1],
        env={**os.environ, **options.pop("env", {})},
        **options,
    )


def read_line(process):
    line = process.stdout.readline().strip()
    assert line, f"the process ended with {process.wait()}"
    return line


def digest(row: bytes) -> int:
    """docs/format.md, 5, word by word."""
    mask = 2**64 - 1
    total = len(row) * 0xD6E8FEB86659FD93
    for i in range(0, len(row), 8):
        word = int.from_bytes(row[i : i + 8].ljust(8, b"\0"), "little")
        x = word ^ ((i // 8 + 1) * 0x9E3779B97F4A7C15 & mask)
        total += (x & 0xFFFFFFFF) * (x >> 32) + x
    return total & mask


def compile_cpp(arguments: list[str]) -> None:
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-pthread", f"-I{CSRC}", *arguments]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]

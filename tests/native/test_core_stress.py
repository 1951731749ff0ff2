"""Thousands of random samples, verified by content: across processes, and under the sanitizers within one."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from native_tools import HERE, CoreError, Producer, _native, compile_cpp, copy_of, read_line, spawn

ROOT = HERE.parents[1]

READER = """
import ctypes
r = t.Consumer(sys.argv[1])
number, total = int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for i in range(total):
    if i % 3 != number and i % 7:
        continue
    key = b"s%d" % i
    lease = r.lease(key, timeout_s=20)
    rows = lease.data_bytes // 72
    bad = ctypes.c_uint64()
    t.check(t.LIB.hsx_verify_rows(None, 0, lease.data, 64, 64, rows, lease.data + 64 * rows, 8, t.byref(bad)))
    assert ctypes.string_at(lease.data, 64 * rows) == (b"%064d" % i) * rows, i
    assert t.head_of(lease) == b"head of %d" % i
    r.release(lease)
r.close()
print("done", flush=True)
"""


def test_three_processes_read(path):
    total, rng = 4000, random.Random(1)
    with Producer(path, capacity=1 << 20, slots=64) as arena:
        readers = [spawn(READER, path, number, total) for number in range(3)]
        for reader in readers:
            assert read_line(reader) == "ready"
        kept = {}
        for i in range(total):
            rows = rng.randrange(40) if i % 50 else rng.randrange(4000)
            consumers = 3 if i % 7 == 0 else 1
            while True:
                try:
                    slot = arena.begin(b"s%d" % i, rows * 72, b"head of %d" % i, payload=rows * 64, consumers=consumers)
                    break
                except CoreError as error:
                    if error.code != _native.FULL:
                        raise
                    arena.wait_space(20)
            data = (b"%064d" % i) * rows
            if rows:
                arena.copies([copy_of(slot, data, rows=rows, digest=64 * rows)])
            arena.seal(slot)
            kept[i % 500] = data  # sources live until their copy is done
            if i % 400 == 399:
                arena.wait()
        for reader in readers:
            assert read_line(reader) == "done"
            assert reader.wait(10) == 0
        stats = arena.stats()
        assert (stats["num_ready"], stats["num_consumed"], stats["payload_bytes"], stats["extent_bytes"]) == (
            total,
            total,
            0,
            0,
        )


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_under_a_sanitizer(path, sanitizer):
    """Built through setup.py's switch; objects stay in build/, so only the first run compiles."""
    built = ROOT / "build" / f"sanitize-{sanitizer.replace(',', '-')}"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(built)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "HSXFER_SANITIZE": sanitizer}, check=True, capture_output=True)
    program = Path(path).with_name("stress")
    library = built / "hsxfer"
    flags = [f"-fsanitize={sanitizer}", "-g", "-O1"]
    compile_cpp(
        [*flags, str(HERE / "stress.cpp"), str(library / "libhsxfer.so"), f"-Wl,-rpath,{library}", "-o", str(program)]
    )
    options = {
        "TSAN_OPTIONS": "halt_on_error=1",
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    run = subprocess.run(
        [program, path, "3000", "1"], env={**os.environ, **options}, capture_output=True, text=True, timeout=120
    )
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel's address layout is not ThreadSanitizer's")
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.endswith(" rows\n")
    assert not run.stderr
    os.unlink(program)


def test_what_is_leased_does_not_change(path, tmp_path):
    """Samples expire and their memory is used again as fast as it goes; readers of other processes hold some of them."""
    program = tmp_path / "race"
    library = ROOT / "hsxfer" / "libhsxfer.so"
    compile_cpp(["-O2", str(HERE / "race.cpp"), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)])
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    producer = subprocess.Popen([program, path, "produce", "2500"], **start)
    assert producer.stdout.readline() == "ready\n"
    readers = [subprocess.Popen([program, path, "read", "2000"], **start) for _ in range(2)]
    for reader in readers:
        out, errors = reader.communicate(timeout=30)
        assert reader.returncode == 0, errors
        assert int(out.split()[0]) > 100, out
    out, errors = producer.communicate(timeout=30)
    assert producer.returncode == 0, errors
    assert int(out) > 1000

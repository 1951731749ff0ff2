"""What a sample goes through, seen from both sides of one process."""

import ctypes
import os
import re
import signal
import subprocess
import threading
import time

import pytest
from native_tools import (
    CONSUMED,
    EXPIRED,
    LIB,
    NEVER,
    RECYCLED,
    Consumer,
    CoreError,
    Producer,
    _native,
    byref,
    bytes_of,
    check,
    copy_of,
    head_of,
    probe,
    read_file,
    read_line,
    spawn,
    tail_of,
    until,
)


def fails(code, match="."):
    """The call raises CoreError of this code."""

    class Check:
        def __enter__(self):
            self.raises = pytest.raises(CoreError, match=match)
            self.info = self.raises.__enter__()
            return self

        def __exit__(self, *exc):
            caught = self.raises.__exit__(*exc)
            assert self.info.value.code == code, self.info.value
            return caught

    return Check()


def test_one_sample(arena, reader):
    slot = arena.begin(b"k", 1000, b'{"head":1}')
    assert reader.code(b"k")[0] == _native.TIMEOUT
    arena.copy(slot, b"x" * 1000)
    arena.seal(slot, b'{"tail":1}')
    lease = reader.lease(b"k", timeout_s=5)
    assert bytes_of(lease) == b"x" * 1000
    assert (head_of(lease), tail_of(lease)) == (b'{"head":1}', b'{"tail":1}')
    assert (lease.generation, lease.sequence, lease.consumers) == (1, 1, 1)
    stats = arena.stats()
    assert (stats["num_live"], stats["payload_bytes"], stats["num_consumed"]) == (1, 1000, 1), "the lease keeps it"
    code, lost = reader.code(b"k")
    assert (code, lost.fate, lost.generation) == (_native.LOST, CONSUMED, 1)
    reader.release(lease)
    stats = arena.stats()
    assert (stats["num_live"], stats["payload_bytes"], stats["extent_bytes"]) == (0, 0, 0)
    with fails(_native.INVALID, "no lease on generation 1 of slot"):
        reader.release(lease)


def test_a_wait_ends_when_the_sample_is_published(arena, reader):
    thread = threading.Timer(0.05, arena.put, (b"late", b"data"))
    thread.start()
    started = time.monotonic()
    assert reader.take(b"late", timeout_s=10) == b"data"
    assert time.monotonic() - started < 2
    thread.join()


def test_waits_time_out(arena, reader):
    for wait in (
        lambda: reader.lease(b"none", timeout_s=0.1),
        lambda: arena.wait(1, 0.1),
        lambda: arena.wait_space(0.1),
    ):
        started = time.monotonic()
        with fails(_native.TIMEOUT):
            wait()
        assert 0.1 <= time.monotonic() - started < 1


def test_acknowledgements(arena, reader):
    arena.put(b"k", b"abc", consumers=2)
    looks = [reader.lease(b"k", ack=False) for _ in range(5)]
    for lease in looks:
        reader.release(lease)
    assert arena.stats()["num_unread"] == 1
    first, second = reader.lease(b"k"), reader.lease(b"k")
    assert reader.code(b"k")[0] == _native.LOST
    assert reader.code(b"k", ack=False)[0] == _native.LOST
    reader.release(second)
    assert arena.stats()["num_live"] == 1
    assert bytes_of(first) == b"abc"
    reader.release(first)
    assert arena.stats()["num_live"] == 0


def test_keys(arena, reader):
    with fails(_native.INVALID, "key of 0 bytes"):
        arena.begin(b"", 1)
    with fails(_native.INVALID, "0 consumers"):
        arena.begin(b"k", 1, consumers=0)
    with fails(_native.INVALID, "65536 consumers"):
        arena.begin(b"k", 1, consumers=65536)
    with fails(_native.INVALID, "payload of 2"):
        arena.begin(b"k", 1, payload=2)
    arena.put(b"k", b"1")
    with fails(_native.BUSY, "'k'"):
        arena.begin(b"k", 1)
    assert reader.take(b"k") == b"1"
    arena.put(b"k", b"2")  # reclaims by itself what was acknowledged
    assert reader.take(b"k") == b"2"
    arena.put(b"k", b"3")
    lease_of_old = reader.lease(b"k")
    arena.put(b"k", b"4")
    assert reader.take(b"k") == b"4"
    assert bytes_of(lease_of_old) == b"3"
    reader.release(lease_of_old)
    long = b"q" * 65535
    arena.put(long, b"5")
    assert reader.take(long) == b"5"


def test_failed_samples(arena, reader):
    slot = arena.begin(b"bad", 100_000)
    arena.copy(slot, b"z" * 100_000)
    arena.seal(slot, b'{"failed":"why"}', failed=True)
    arena.wait()
    stats = arena.stats()
    assert stats["payload_bytes"] == 0
    assert stats["extent_bytes"] < 1000, "its data is free"
    for _ in range(3):
        code, lease = reader.code(b"bad")
        assert code == _native.FAILED
        assert tail_of(lease) == b'{"failed":"why"}'
        assert lease.data_bytes == 0
        reader.release(lease)
    assert arena.stats()["num_failed"] == 1
    arena.put(b"next", b"1")
    assert reader.lease(b"next").sequence == 2, "the gap is the sample that failed"
    arena.put(b"bad", b"better")  # may be tried again; its failure is not told any more
    assert reader.lease(b"bad").data_bytes == 6


def test_seal_once_and_in_time(arena):
    slot = arena.begin(b"k", 10)
    with fails(_native.INVALID, "a tail of 300 bytes, the slot has room for 256"):
        arena.seal(slot, b"x" * 300)
    arena.seal(slot)
    with fails(_native.INVALID, "sealed already"):
        arena.seal(slot)
    with fails(_native.INVALID, "sealed"):
        arena.copy(slot, b"0123456789")
    stale = _native.Slot(slot.generation + 1, slot.index, 0)
    with fails(_native.INVALID, "generation 2 of slot"):
        arena.seal(stale)
    with fails(_native.INVALID, "slot 999999"):
        arena.seal(_native.Slot(1, 999999, 0))


U64 = 2**64 - 1


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 1},
        {"offset": U64},
        {"row_bytes": 101},
        {"row_bytes": U64},
        {"rows": 2, "row_bytes": 50, "dst_stride_bytes": 51},
        {"rows": U64, "row_bytes": 50, "dst_stride_bytes": U64},
        {"rows": 2, "row_bytes": 0, "dst_stride_bytes": 101},
        {"digest": 96},
        {"digest": 4},
        {"digest": 0, "digest_stride_bytes": 12},
        {"rows": 2, "row_bytes": 8, "digest": 88, "digest_stride_bytes": 16},
        {"rows": 2, "row_bytes": 8, "digest": 0, "digest_stride_bytes": U64 - 7},
    ],
)
def test_copies_outside_of_the_slot(arena, reader, fields):
    data = bytes(100)
    slot = arena.begin(b"k", 100)
    other = arena.begin(b"other", 100)
    good = copy_of(other, b"y" * 100)
    with fails(_native.INVALID, "copy 1: .* the slot's 100 bytes"):
        arena.copies([good, copy_of(slot, data, **{"row_bytes": 100, **fields})])
    arena.seal(other)
    arena.wait()
    assert arena.stats()["num_copies"] == 0, "all or none"
    assert bytes_of(reader.lease(b"other")) != b"y" * 100


def test_edges_of_the_slot(arena, reader):
    slot = arena.begin(b"k", 100)
    data = bytes(range(100))
    copies = [
        copy_of(slot, data, rows=2, row_bytes=10, dst_stride_bytes=90, src_stride_bytes=0),
        copy_of(slot, data, offset=100, rows=1, row_bytes=0),
        copy_of(slot, None, offset=U64, rows=0, row_bytes=5),
        copy_of(slot, data, offset=50, rows=1, row_bytes=8, digest=40),
    ]
    arena.copies(copies)
    arena.seal(slot)
    got = bytes_of(reader.lease(b"k", timeout_s=5))
    assert got[:10] == got[90:] == data[:10]
    assert got[50:58] == data[:8]


def test_the_last_write_holds(arena, reader):
    slot = arena.begin(b"k", 4)
    for i in range(200):
        arena.copy(slot, b"%04d" % i)
    arena.seal(slot)
    assert reader.take(b"k") == b"0199"


def test_a_full_arena(path):
    with Producer(path, capacity=1000, slots=64) as arena, Consumer(path) as reader:
        arena.put(b"a", b"1" * 600)
        with fails(_native.FULL, "500 bytes of payload do not fit: 600 of 1000 are in use"):
            arena.begin(b"b", 500)
        with fails(_native.FULL):
            arena.begin(b"b", 1001)
        before = arena.stats()
        with fails(_native.FULL, "can never fit into a region"):
            arena.begin(b"b", 1 << 30, payload=1)
        assert arena.stats() == before
        assert reader.code(b"b")[0] == _native.TIMEOUT, "nothing is left of it"
        lease = reader.lease(b"a")
        with fails(_native.FULL):
            arena.begin(b"b", 500)
        thread = threading.Timer(0.05, reader.release, (lease,))
        thread.start()
        started = time.monotonic()
        arena.wait_space(5)
        assert time.monotonic() - started < 1
        thread.join()
        arena.put(b"b", b"2" * 500)
        assert reader.take(b"b") == b"2" * 500


def test_space_released_between_full_and_wait_is_not_missed(path):
    with Producer(path, capacity=1000) as arena, Consumer(path) as reader:
        arena.put(b"a", b"1" * 600)
        with fails(_native.FULL):
            arena.begin(b"b", 500)
        reader.take(b"a")
        arena.stats()  # reclaims it
        arena.wait_space(0)
        with fails(_native.TIMEOUT):
            arena.wait_space(0)


def test_one_release_wakes_all_who_wait(path):
    with Producer(path, capacity=1000) as arena, Consumer(path) as reader:
        arena.put(b"a", b"1" * 600)
        with fails(_native.FULL):
            arena.begin(b"b", 500)
        waited = []

        def wait():
            started = time.monotonic()
            arena.wait_space(5)
            waited.append(time.monotonic() - started)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        reader.take(b"a")
        for thread in threads:
            thread.join()
        assert len(waited) == 4
        assert max(waited) < 1


def test_no_extent_although_the_payload_fits(path):
    with Producer(path, capacity=1 << 20, region=1 << 20) as arena, Consumer(path) as reader:
        for i in range(16):
            arena.put(b"k%d" % i, bytes(60_000))
        for i in range(0, 16, 2):
            reader.take(b"k%d" % i)
        with fails(_native.FULL, "an extent of .* does not fit: .* the largest free piece has"):
            arena.begin(b"big", 200_000)
        reader.take(b"k1")
        arena.begin(b"fits", 120_000)


def test_slots_are_reused_longest_retired_first(path):
    with Producer(path, slots=4) as arena, Consumer(path) as reader:
        for key in (b"a", b"b", b"c"):
            arena.put(key, key)
        for key in (b"b", b"a", b"c"):
            reader.take(key)
            arena.stats()
        arena.put(b"d", b"d")  # the slot never used before
        assert [reader.code(key)[1].fate for key in (b"a", b"b", b"c")] == [CONSUMED] * 3
        for key, gone in ((b"e", b"b"), (b"f", b"a"), (b"g", b"c")):
            assert reader.code(gone)[0] == _native.LOST
            slot = arena.put(key, key)
            assert slot.generation == 2
            code, lease = reader.code(gone)
            assert (code, lease.fate) == (_native.TIMEOUT, NEVER)
        with fails(_native.FULL, "all 4 slots"):
            arena.begin(b"h")


def test_failed_descriptions_make_room_for_slots(path):
    with Producer(path, slots=3) as arena, Consumer(path) as reader:
        for key in (b"f1", b"f2"):
            arena.fail(key)
        arena.put(b"good", b"1")
        lease = reader.code(b"f1")[1]
        arena.begin(b"x")  # f1 is leased: its slot is not there yet, so f2 goes too
        assert arena.stats()["num_recycled"] == 2
        code, lost = reader.code(b"f1")
        assert (code, lost.fate) == (_native.LOST, RECYCLED)
        assert tail_of(lease) == b'{"failed":"test"}'
        reader.release(lease)
        arena.begin(b"y")
        with fails(_native.FULL, "all 3 slots"):
            arena.begin(b"z")
        assert reader.take(b"good") == b"1"


def test_failed_descriptions_make_room_in_the_region(path):
    with Producer(path, capacity=1 << 20, region=64 << 10) as arena, Consumer(path) as reader:
        for i in range(10):
            arena.fail(b"f%d" % i)
        with fails(_native.FULL):
            arena.begin(b"too big", 65_200)
        assert arena.stats()["num_recycled"] == 0, "they would not have helped, so they stay"
        arena.begin(b"big", 62_000)
        assert reader.code(b"f0")[1].fate == RECYCLED


def test_unread_samples_expire_and_leased_ones_do_not(path):
    with Producer(path, ttl_s=0.3) as arena, Consumer(path) as reader:
        arena.put(b"a", b"1")
        arena.put(b"held", b"2", consumers=2)
        arena.fail(b"failed")
        lease = reader.lease(b"held")
        until(lambda: probe(path)["num_ready"] == 1, what="expiry without any call of the producer")
        assert reader.code(b"a")[1].fate == EXPIRED
        assert reader.code(b"failed")[1].fate == EXPIRED
        time.sleep(0.3)
        assert bytes_of(lease) == b"2"
        second = reader.lease(b"held")
        reader.release(second)
        reader.release(lease)
        stats = arena.stats()
        assert (stats["num_expired"], stats["num_consumed"], stats["payload_bytes"]) == (2, 1, 0)


def test_close_without_unread_samples_removes_the_files(path):
    arena, reader = Producer(path), Consumer(path)
    arena.put(b"a", b"1")
    lease = reader.lease(b"a")
    arena.fail(b"failed")
    arena.close()
    assert not os.path.exists(path + ".arena")
    assert not os.path.exists(path + ".ack")
    assert reader.alive() == (False, True)
    assert bytes_of(lease) == b"1", "who has it mapped keeps it"
    assert reader.code(b"failed")[0] == _native.FAILED
    started = time.monotonic()
    assert reader.code(b"none", timeout_s=5)[0] == _native.TIMEOUT
    assert time.monotonic() - started < 1, "nothing will come any more"
    with reader:
        assert bytes_of(lease) == b"1"


def test_close_removes_only_its_own_files(path):
    arena = Producer(path)
    os.rename(path + ".arena", path + ".moved")
    with open(path + ".arena", "w") as file:
        file.write("somebody else's")
    arena.close()
    assert sorted(os.listdir(os.path.dirname(path))) == sorted(
        os.path.basename(path) + end for end in (".arena", ".moved")
    )


def test_close_with_unread_samples_keeps_them_and_gives_the_rest_back(path):
    arena = Producer(path, capacity=16 << 20)
    payload = os.urandom(3_000_000)
    for i in range(4):
        arena.put(b"k%d" % i, payload)
    with Consumer(path) as reader:
        for key in (b"k0", b"k2"):
            reader.take(key)
        full = os.stat(path + ".arena").st_blocks * 512
        slot = arena.begin(b"open", 1000)
        arena.close()
        used = os.stat(path + ".arena").st_blocks * 512
        assert full >= 16 << 20
        assert 6_000_000 <= used < 7_000_000
        code, lease = reader.code(b"open")
        assert code == _native.FAILED
        assert tail_of(lease) == b'{"failed":"its producer closed the arena before it was sealed"}'
        reader.release(lease)
        assert reader.take(b"k1") == payload
        info = probe(path)
        assert (info["alive"], info["closed"], info["num_ready"], info["num_unread"]) == (0, 1, 2, 1)
    with Consumer(path) as late:
        assert late.alive() == (False, True)
        assert late.take(b"k3") == payload
    assert probe(path)["num_unread"] == 0
    with fails(_native.INVALID, "closed"):
        arena.seal(slot)


def test_close_finishes_what_is_queued(path):
    arena = Producer(path, capacity=64 << 20)
    payload = os.urandom(8_000_000)
    for i in range(4):
        slot = arena.begin(b"k%d" % i, len(payload))
        arena.copy(slot, payload)
        arena.seal(slot)
    arena.close()
    with Consumer(path) as reader:
        assert all(reader.take(b"k%d" % i) == payload for i in range(4))


def test_calls_after_close(path):
    arena = Producer(path)
    reader = Consumer(path)
    slot = arena.begin(b"k", 10)
    arena.close()
    reader.close()
    for call in (
        lambda: arena.begin(b"l"),
        lambda: arena.copy(slot, b"x"),
        lambda: arena.stats(),
        lambda: arena.wait(1, 0),
        lambda: arena.close(),
        lambda: reader.lease(b"k"),
        lambda: reader.alive(),
        lambda: reader.close(),
        lambda: check(LIB.hsx_arena_stats(None, None)),
    ):
        with fails(_native.INVALID):
            call()


def test_close_wakes_waiters(path):
    arena = Producer(path)
    codes = []

    def wait(call):
        try:
            call()
        except CoreError as error:
            codes.append(error.code)

    threads = [
        threading.Thread(target=wait, args=(call,))
        for call in (lambda: arena.wait(100, 20), lambda: arena.wait_space(20))
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    arena.close()
    for thread in threads:
        thread.join()
    assert codes == [_native.INVALID] * 2
    assert time.monotonic() - started < 2


def test_a_reader_with_leases_does_not_close(arena):
    reader = Consumer(arena.path)
    arena.put(b"k", b"1")
    lease = reader.lease(b"k")
    with fails(_native.BUSY, "1 slots .* are still leased"):
        reader.close()
    reader.release(lease)
    reader.close()


def test_device_errors_fail_the_slots_of_their_submission(path):
    with Producer(path, driver="host-faulty") as arena, Consumer(path) as reader:
        good, bad, small = arena.begin(b"good", 4), arena.begin(b"bad", 4), arena.begin(b"small", 4, tail_capacity=20)
        arena.copy(good, b"aaaa")
        arena.copies([copy_of(bad, b"bbbb"), copy_of(small, b"cccc")])  # the driver fails each second one
        for slot in (good, bad, small):
            arena.seal(slot)
        arena.wait()
        assert reader.take(b"good") == b"aaaa"
        code, lease = reader.code(b"bad")
        assert code == _native.FAILED
        assert tail_of(lease) == b'{"failed":"the device reported an error (driver host-faulty)"}'
        reader.release(lease)
        code, lease = reader.code(b"small")
        assert (code, tail_of(lease)) == (_native.FAILED, b'{"failed":"the dev"}')
        reader.release(lease)
        assert arena.stats()["payload_bytes"] == 0


def test_direct_writes(arena, reader):
    slot = arena.begin(b"k", 100)
    address, num_bytes = arena.data(slot)
    assert num_bytes == 100
    assert address % 256 == 0
    ctypes.memset(address, 7, 100)
    arena.seal(slot)
    assert reader.take(b"k") == b"\7" * 100
    arena.stats()
    with fails(_native.INVALID, "generation 1 of slot 0 is gone"):
        arena.data(slot)


@pytest.mark.parametrize(
    ("options", "code", "match"),
    [
        ({"capacity": 0}, _native.INVALID, "capacity of 0"),
        ({"capacity": 2**60}, _native.INVALID, "capacity of"),
        ({"capacity": 2**47}, _native.FULL, "needs .* bytes, its file system has"),
        ({"slots": 2**31}, _native.INVALID, "slots"),
        ({"driver": "none"}, _native.INVALID, "'none'"),
        ({"driver": "cuda"}, _native.UNAVAILABLE, "driver cuda: "),
    ],
)
def test_create_refuses(path, options, code, match):
    if options.get("driver") == "cuda" and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is a GPU")
    with fails(code, match):
        Producer(path, **options)
    assert os.listdir(os.path.dirname(path)) == []


def test_create_under_a_profilers_timer(path):
    """Each signal interrupts fallocate, and on tmpfs an interrupted one starts from nothing."""
    ticks = []
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        Producer(path, capacity=300 << 20).close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ticks


SMALL = """
import os
arena = t.Producer(sys.argv[1], capacity=5 << 20)
slot = arena.put(b"k", bytes(5 << 20))                  # every page of it is there
with t.Consumer(sys.argv[1]) as reader:
    assert len(reader.take(b"k")) == 5 << 20
arena.close()
try:
    t.Producer(sys.argv[1], capacity=16 << 20)
except t.CoreError as error:
    print(error, os.listdir(os.path.dirname(sys.argv[1])), flush=True)
"""


def test_a_small_file_system(tmp_path):
    mount = f"mount -t tmpfs -o size=8m none {tmp_path} && exec "
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount + "true"], capture_output=True).returncode:
        pytest.skip("no mounts here")
    child = spawn(SMALL, tmp_path / "x", prefix=("unshare", "-rm", "sh", "-c", mount + '"$@"', "sh"))
    line = read_line(child)
    assert re.fullmatch(
        rf"{_native.FULL}: {tmp_path}/x.arena needs 18\d+ bytes, its file system has 8\d+ free \[\]", line
    )


def test_space_that_runs_out_in_mid_reservation(path):
    script = """
import os, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20, 100 << 20))
try:
    t.Producer(sys.argv[1], capacity=200 << 20)
except t.CoreError as error:
    print(error, os.listdir(os.path.dirname(sys.argv[1])), flush=True)
"""
    line = read_line(spawn(script, path))
    assert re.fullmatch(
        rf"{_native.FULL}: fallocate of {path}.arena failed at 67108864 of \d+ bytes: File too large \[\]", line
    )


def test_create_does_not_take_a_name_twice(arena):
    with fails(_native.INVALID, "already there"):
        Producer(arena.path)
    arena.put(b"k", b"1")
    assert probe(arena.path)["num_ready"] == 1


def test_create_in_no_directory():
    with fails(_native.SYSTEM, "No such file or directory"):
        Producer("/dev/shm/hsxfer-not-there/x")


def test_open_what_is_not_there(path):
    with fails(_native.SYSTEM, "No such file"):
        Consumer(path)
    with fails(_native.SYSTEM, "No such file"):
        probe(path)


def test_probe_does_not_disturb(arena, reader):
    arena.put(b"k", b"12345", consumers=2)
    arena.fail(b"f")
    arena.begin(b"o", 77)
    lease = reader.lease(b"k")
    info = probe(arena.path)
    assert {name: info[name] for name in ("num_ready", "num_open", "num_failed", "num_unread", "payload_bytes")} == {
        "num_ready": 1,
        "num_open": 1,
        "num_failed": 1,
        "num_unread": 1,
        "payload_bytes": 82,
    }
    assert (info["alive"], info["closed"], info["readers_attached"]) == (1, 0, 1)
    assert info["file_bytes"] == len(read_file(arena.path + ".arena"))
    assert bytes_of(lease) == b"12345"
    reader.release(lease)


def test_null_arguments():
    handle = ctypes.c_void_p()
    for code in (
        LIB.hsx_arena_create(None, byref(handle)),
        LIB.hsx_arena_create(byref(_native.ArenaOptions()), byref(handle)),
        LIB.hsx_reader_open(None, byref(handle)),
        LIB.hsx_probe(None, None),
        LIB.hsx_copy_rows(None, 0, None, 0, 8, 1, None, 0),
        LIB.hsx_verify_rows(None, 0, None, 0, 8, 1, None, 0, None),
    ):
        assert code == _native.INVALID
        assert LIB.hsx_last_error()

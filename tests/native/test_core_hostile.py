"""Files that are not what they seem: codes, never a crash. The reader runs in a process of its own, which must live."""

import os
import random
import struct

import pytest
from native_tools import Consumer, CoreError, Producer, _native, probe, read_line, spawn

TRY = """
import os
for line in sys.stdin:
    path = line.strip()
    codes = set()
    try:
        t.probe(path)
    except t.CoreError as error:
        codes.add(error.code)
    try:
        r = t.Consumer(path)
    except t.CoreError as error:
        codes.add(error.code)
    else:
        for key in (b"k0", b"k1", b"k2", b"failed", b"open", b"none"):
            code, lease = r.code(key, ack=key != b"k0")
            codes.add(code)
            if code in (0, t._native.FAILED):
                t.head_of(lease), t.tail_of(lease), t.bytes_of(lease)
                r.release(lease)
        r.alive()
        r.close()
    print(*sorted(codes), flush=True)
"""


@pytest.fixture
def sample_files(path):
    """The bytes of an arena with something in every state."""
    arena = Producer(path, capacity=4000, slots=8, region=8192)
    for i in range(3):
        arena.put(b"k%d" % i, bytes([i]) * 1000)
    arena.fail(b"failed")
    arena.begin(b"open", 100)
    with open(path + ".arena", "rb") as file:
        data = file.read()
    with open(
        path + ".ack", "rb"
    ) as file:  # to close it drops this process's locks, which this arena does not need any more
        ack = file.read()
    arena.close()
    for suffix in (".arena", ".ack"):
        if os.path.exists(path + suffix):
            os.unlink(path + suffix)
    return data, ack


@pytest.fixture
def attempt(path):
    child = spawn(TRY)

    def run(arena, ack):
        for suffix, data in ((".arena", arena), (".ack", ack)):
            with open(path + suffix, "wb") as file:
                file.write(data)
        child.stdin.write(path + "\n")
        child.stdin.flush()
        return {int(code) for code in read_line(child).split()}

    yield run
    child.stdin.close()
    assert child.wait(10) == 0


def test_the_files_themselves_are_good(sample_files, attempt):
    assert attempt(*sample_files) == {_native.OK, _native.FAILED, _native.TIMEOUT}


def test_truncated_files(sample_files, attempt):
    data, ack = sample_files
    for length in (0, 1, 255, 4095, 4096, 8191, len(data) // 2, len(data) - 1):
        assert attempt(data[:length], ack) == {_native.INVALID}, length
    for length in (0, 64, 4096, len(ack) - 1):
        assert attempt(data, ack[:length]) == {_native.INVALID}, length
    assert attempt(data + b"\0", ack) == {_native.INVALID}
    assert attempt(data, ack + bytes(4096)) == {_native.INVALID}


def test_random_bytes(attempt):
    rng = random.Random(0)
    for length in (4096, 50_000):
        assert attempt(rng.randbytes(length), rng.randbytes(8192)) == {_native.INVALID}
        assert attempt(b"HSXARENA" + rng.randbytes(length), b"HSXACK00" + rng.randbytes(8184)) == {_native.INVALID}


FIELDS = [
    (8, "I"),
    (12, "I"),
    (16, "Q"),
    (32, "Q"),
    (40, "I"),
    (44, "I"),
    (48, "Q"),
    (56, "I"),
    (60, "I"),
    (64, "Q"),
    (72, "Q"),
]


@pytest.mark.parametrize(("offset", "kind"), FIELDS)
def test_each_header_field(sample_files, attempt, offset, kind):
    data, ack = sample_files
    good = struct.unpack_from("<" + kind, data, offset)[0]
    top = 2 ** (8 * struct.calcsize(kind))
    for value in (0, 1, good - 1, good + 1, good * 2, top // 2, top - 1, top - 4096, top - 64):
        bad = bytearray(data)
        struct.pack_into("<" + kind, bad, offset, value % top)
        codes = attempt(bad, ack)
        harmless = (
            offset in (48, 32) or value == good or (offset == 72 and value < good) or (offset == 56 and value > good)
        )
        if not harmless:
            assert codes == {_native.INVALID}, value


def test_mutations(sample_files, attempt):
    """Header, slot table, directory and extents with random damage of all sizes."""
    data, ack = sample_files
    rng = random.Random(7)
    region = struct.unpack_from("<Q", data, 64)[0]
    spots = [*range(0, 256), *range(4096, 4096 + 8 * 64), *range(8192, 8192 + 16 * 16)]
    spots += [region + extent + at for extent in range(0, 8192, 256) for at in range(0, 80)]
    for _ in range(400):
        bad = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 5, 40])):
            at = rng.choice(spots)
            size = rng.choice([1, 2, 4, 8])
            value = rng.choice(
                [0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), rng.getrandbits(8 * size), rng.getrandbits(12)]
            )
            if at + size <= len(bad):
                bad[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        assert attempt(bad, ack) <= set(range(11))


def test_every_slot_field(sample_files, attempt):
    data, ack = sample_files
    for slot in range(8):
        for offset, size in ((4, 4), (24, 8), (32, 8), (48, 2), (52, 4), (56, 4)):
            for value in (0, 1, 255, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 256):
                bad = bytearray(data)
                at = 4096 + 64 * slot + offset
                bad[at : at + size] = value.to_bytes(size, "little")
                assert attempt(bad, ack) <= set(range(11)), (slot, offset, value)


def test_a_hash_that_collides(sample_files, path):
    """The directory says k1, the slot says k1, and the key itself is another one: it is not k1."""
    data, ack = sample_files
    region = struct.unpack_from("<Q", data, 64)[0]
    extent = struct.unpack_from("<Q", data, 4096 + 64 + 24)[0]
    bad = bytearray(data)
    assert bad[region + extent + 64 :][:2] == b"k1"
    bad[region + extent + 65] = ord("x")
    for suffix, content in ((".arena", bad), (".ack", ack)):
        with open(path + suffix, "wb") as file:
            file.write(content)
    with Consumer(path) as reader:
        assert reader.code(b"k1")[0] == _native.TIMEOUT
        assert reader.take(b"k2") == bytes([2]) * 1000


def test_hostile_acknowledgements(sample_files, attempt):
    data, ack = sample_files
    for word in (2**64 - 1, 0, 1 << 32 | 0xFFFFFFFF, 0xFFFFFFFF):
        bad = bytearray(ack)
        for slot in range(8):
            struct.pack_into("<Q", bad, 4096 + 8 * slot, word)
        assert attempt(data, bad) <= {_native.OK, _native.FAILED, _native.TIMEOUT, _native.LOST}


def test_what_is_no_file(path):
    os.mkdir(path + ".arena")
    for call in (Consumer, probe):
        with pytest.raises(CoreError) as error:
            call(path)
        assert error.value.code == _native.INVALID
    os.rmdir(path + ".arena")
    os.mkfifo(path + ".arena")
    for call in (Consumer, probe):
        with pytest.raises(CoreError, match="not a regular file") as error:
            call(path)
    os.unlink(path + ".arena")
    with Producer(path + "x") as arena:
        arena.put(b"k", b"1")
        os.symlink(path + "x.arena", path + ".arena")
        os.link(path + "x.ack", path + ".ack")
        with pytest.raises(CoreError, match="not a file of ours"):
            Consumer(path)


def test_a_producer_survives_scribbled_acknowledgements(path):
    """Any consumer may write that file."""
    with Producer(path) as arena, Consumer(path) as reader:
        for i in range(4):
            arena.put(b"k%d" % i, b"data")
        script = """
with open(sys.argv[1], "r+b") as file:
    file.seek(4096)
    file.write(bytes([255]) * 16 + bytes(16))
"""
        assert spawn(script, path + ".ack").wait(10) == 0
        assert arena.stats()["num_unread"] == 4, "of no generation that there is"
        lease = reader.lease(b"k0")
        reader.release(lease)
        arena.put(b"k4", b"data")
        assert reader.take(b"k4") == b"data"

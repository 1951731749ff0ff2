"""The extent allocator against a model: pieces never overlap, and whatever is free is one piece where it can be."""

import ctypes
import random

import pytest

REGION = 1 << 20
NONE = 2**64 - 1


@pytest.fixture
def extents(parts):
    parts.extents_new.restype = ctypes.c_void_p
    for name in ("allocate", "used", "largest", "free_pieces"):
        getattr(parts, f"extents_{name}").restype = ctypes.c_uint64
    handle = ctypes.c_void_p(parts.extents_new(ctypes.c_uint64(REGION)))
    table = (ctypes.c_uint64 * 20000)()

    def call(name, *values):
        return getattr(parts, f"extents_{name}")(handle, *map(ctypes.c_uint64, values))

    def free_pieces():
        count = parts.extents_free_pieces(handle, table)
        return [(table[2 * i], table[2 * i + 1]) for i in range(count)]

    call.free_pieces = free_pieces
    yield call
    parts.extents_delete(handle)


@pytest.mark.parametrize("seed", range(6))
def test_random_use(extents, seed):
    rng = random.Random(seed)
    live: dict[int, int] = {}
    for step in range(3000):
        if live and rng.random() < (0.4 if step < 2000 else 0.6):
            offset = rng.choice(list(live))
            extents("release", offset, live.pop(offset))
        else:
            num_bytes = 256 * (rng.randrange(1, 40) if rng.random() < 0.95 else rng.randrange(1, 1500))
            largest = extents("largest")
            offset = extents("allocate", num_bytes)
            assert (offset == NONE) == (num_bytes > largest)
            if offset != NONE:
                live[offset] = num_bytes
        if step % 50 == 0 or step > 2950:
            taken = sorted(live.items())
            gaps, end = [], 0
            for offset, num_bytes in taken:
                assert offset >= end, "two pieces overlap"
                if offset > end:
                    gaps.append((end, offset - end))
                end = offset + num_bytes
            assert end <= REGION
            if end < REGION:
                gaps.append((end, REGION - end))
            assert extents.free_pieces() == gaps
            assert extents("used") == sum(live.values())
    for offset, num_bytes in live.items():
        extents("release", offset, num_bytes)
    assert extents("largest") == REGION
    assert extents("used") == 0


def test_smallest_fit(extents):
    a, b, c, d = (extents("allocate", size) for size in (1024, 256, 512, 256))
    extents("release", a, 1024)
    extents("release", c, 512)
    assert extents("allocate", 512) == c, "the big hole stays whole"
    extents("release", b, 256)
    assert extents("allocate", 1280) == a, "neighbours became one piece"
    assert d == 1024 + 256 + 512

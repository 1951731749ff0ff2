"""Copy and digest in one pass: every path against docs/format.md, 5, in plain Python."""

import ctypes
import random

import numpy as np
import pytest
from native_tools import LIB, CoreError, _native, byref, check, digest


@pytest.fixture(params=["generic", "avx2", "avx512"])
def kernel(request, parts):
    name = request.param.encode()
    if not parts.has_kernels(name):
        pytest.skip(f"this CPU has no {request.param}")
    parts.digest_row.restype = ctypes.c_uint64
    parts.digest_row.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    return lambda dst, src, num_bytes, stream: parts.digest_row(name, dst, src, num_bytes, stream)


def test_digest_of_all_small_sizes(kernel):
    rng = random.Random(1)
    source = ctypes.create_string_buffer(rng.randbytes(4096), 4096)
    target = ctypes.create_string_buffer(4096)
    for num_bytes in [*range(201), *(rng.randrange(200, 2200) for _ in range(60))]:
        at, to = rng.randrange(64), rng.randrange(64)
        row = source.raw[at : at + num_bytes]
        expected = digest(row)
        address = ctypes.addressof(source) + at
        assert kernel(None, address, num_bytes, 0) == expected, num_bytes
        for stream in (0, 1):
            for shift in (to, -ctypes.addressof(target) % 64):
                ctypes.memset(target, 0xEE, 4096)
                assert kernel(ctypes.addressof(target) + shift, address, num_bytes, stream) == expected, num_bytes
                expected_bytes = b"\xee" * shift + row + b"\xee" * (4096 - shift - num_bytes)
                assert target.raw == expected_bytes, (num_bytes, stream, shift)


def test_digest_of_extreme_words(kernel):
    for word in (0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1):
        row = word.to_bytes(8, "little") * 40
        assert kernel(None, ctypes.cast(ctypes.c_char_p(row), ctypes.c_void_p), len(row), 0) == digest(row)


def test_digest_sees_any_change_of_half_a_word(kernel):
    rng = random.Random(2)
    row = bytearray(rng.randbytes(333))
    buffer = (ctypes.c_char * 333).from_buffer(row)
    before = kernel(None, ctypes.addressof(buffer), 333, 0)
    for _ in range(300):
        at = rng.randrange(333) // 4 * 4
        old = bytes(row[at : at + 4])
        row[at : at + 4] = rng.randbytes(len(old))
        same = bytes(row[at : at + 4]) == old
        assert (kernel(None, ctypes.addressof(buffer), 333, 0) == before) == same
        row[at : at + 4] = old


@pytest.mark.parametrize("seed", range(30))
def test_copy_rows_strided(seed):
    rng = np.random.default_rng(seed)
    rows, row_bytes = int(rng.integers(0, 30)), int(rng.integers(0, 600))
    src_stride, dst_stride = row_bytes + int(rng.integers(0, 70)), row_bytes + int(rng.integers(0, 70))
    if seed == 0:
        rows, row_bytes, src_stride, dst_stride = 900, 6144, 6144, 6144  # past the caches
    digest_stride = 8 * int(rng.integers(1, 4))
    src = rng.integers(0, 256, src_stride * rows + 64, dtype=np.uint8)
    dst = np.full(dst_stride * rows + 64, 0xEE, np.uint8)
    digests = np.zeros(digest_stride // 8 * rows + 1, np.uint64)
    check(
        LIB.hsx_copy_rows(
            dst.ctypes.data,
            dst_stride,
            src.ctypes.data,
            src_stride,
            row_bytes,
            rows,
            digests.ctypes.data,
            digest_stride,
        )
    )
    expected = np.full_like(dst, 0xEE)
    for row in range(rows):
        expected[row * dst_stride :][:row_bytes] = src[row * src_stride :][:row_bytes]
    assert (dst == expected).all()
    table = digests[:-1].reshape(rows, digest_stride // 8)
    checked = range(0, rows, 100) if seed == 0 else range(rows)
    assert all(int(table[row, 0]) == digest(src[row * src_stride :][:row_bytes].tobytes()) for row in checked)
    assert not table[:, 1:].any()
    # Copy alone gives the same bytes, and digests alone the same digests.
    plain, again = np.full_like(dst, 0xEE), np.zeros_like(digests)
    check(LIB.hsx_copy_rows(plain.ctypes.data, dst_stride, src.ctypes.data, src_stride, row_bytes, rows, None, 0))
    check(LIB.hsx_copy_rows(None, 0, src.ctypes.data, src_stride, row_bytes, rows, again.ctypes.data, digest_stride))
    assert (plain == expected).all()
    assert (again == digests).all()


def test_verify_rows_names_the_first_bad_row():
    rng = np.random.default_rng(3)
    src = rng.integers(0, 256, (50, 123), dtype=np.uint8)
    digests = np.zeros(50, np.uint64)
    bad = ctypes.c_uint64()

    def verify(dst=None):
        arguments = (dst, 123, src.ctypes.data, 123, 123, 50, digests.ctypes.data, 8, byref(bad))
        check(LIB.hsx_verify_rows(*arguments))

    check(LIB.hsx_copy_rows(None, 0, src.ctypes.data, 123, 123, 50, digests.ctypes.data, 8))
    dst = np.zeros_like(src)
    verify(dst.ctypes.data)
    assert bad.value == 50
    assert (dst == src).all()
    src[31, 122] ^= 1
    src[40, 0] ^= 1
    with pytest.raises(CoreError, match="row 31 of 50") as error:
        verify()
    assert error.value.code == _native.INTEGRITY
    assert bad.value == 31

"""Kernels against what torch and the CPU routine say; few and small, so that compute-sanitizer gets through them."""

from __future__ import annotations

import pytest
from gpu import get_checked, random_rows, same, torch

import hsxfer
from hsxfer import _native
from hsxfer.encoding import decode_torch, encode, encode_torch, screen
from hsxfer.layout import encoded_row_bytes
from hsxfer.tensors import bad_rows, rows_of

WIDTHS = [1, 7, 8, 33, 1000, 4096, 12288]


def values(rows: int, width: int, dtype: str) -> torch.Tensor:
    """Numbers of every size, some rows with zeros only, with NaN or with infinities."""
    generator = torch.Generator().manual_seed(rows * width)
    made = torch.randn(rows, width, generator=generator) * torch.logspace(-6, 4, rows)[:, None]
    made = made.clamp(-60000, 60000)
    made[1 % rows] = 0
    made[2 % rows, width // 2] = torch.nan
    made[3 % rows, width - 1] = -torch.inf
    return made.to(getattr(torch, dtype))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_fp8_is_what_torch_makes(width: int, dtype: str) -> None:
    rows = values(37, width, dtype)
    encoded = encode(rows_of(rows.cuda()), "fp8").owner[0]
    assert same(encoded, encode_torch(rows, "fp8"))
    wide = torch.zeros(37, width + 5, dtype=rows.dtype)
    wide[:, 3 : 3 + width] = rows  # rows that are not aligned
    assert same(encode(rows_of(wide.cuda()[:, 3 : 3 + width]), "fp8").owner[0], encoded)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("encoding", ["fp8", "bf16"])
def test_round_trip(store: str, width: int, dtype: str, encoding: str) -> None:
    rows = values(37, width, dtype)
    with hsxfer.open_sink(store + f"?capacity=16MiB&encode={encoding}") as sink, hsxfer.open_source(store) as source:
        expected = rows
        if (encoding, dtype) != ("bf16", "bfloat16"):
            expected = decode_torch(encode_torch(rows, encoding), encoding, dtype, width)
        handle = sink.put({"x": rows.cuda()}, consumers=2)
        on_gpu = source.get(handle, device="cuda:0")["x"]
        assert on_gpu.dtype == rows.dtype
        nan = expected.isnan()
        assert torch.equal(on_gpu.cpu().isnan(), nan)
        assert torch.equal(on_gpu.cpu()[~nan], expected[~nan])
        assert torch.equal(get_checked(store, handle)["x"][~nan], expected[~nan])


def test_raw_on_the_gpu(store: str) -> None:
    rows = values(37, 100, "bfloat16")
    with hsxfer.open_sink(store + "?capacity=16MiB&encode=fp8") as sink, hsxfer.open_source(store) as source:
        raw = source.get(sink.put({"x": rows.cuda()}), device="cuda:0", raw=True)["x"]
        assert raw.shape == (37, encoded_row_bytes("fp8", 100))
        assert same(raw, encode_torch(rows, "fp8"))


@pytest.mark.parametrize("row_bytes", [1, 2, 7, 8, 15, 16, 17, 100, 4096, 24_576])
@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_digests_at_every_alignment(store: str, row_bytes: int, shift: int) -> None:
    wide = random_rows(70, row_bytes + 16, "uint8", seed=row_bytes)
    rows = wide[:, shift : shift + row_bytes]
    with hsxfer.open_sink(store + "?capacity=16MiB&slots=1024") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": rows}, consumers=2)
        assert same(get_checked(store, handle)["x"], rows)
        assert same(source.get(handle, device="cuda:0")["x"], rows)
        # Many small ones: the kernel that copies and digests in one pass.
        tickets = [sink.begin(f"r{i}", {"x": ((1, row_bytes), "uint8")}) for i in range(70)]
        sink.write_many([(ticket, "x", 0, rows[i : i + 1]) for i, ticket in enumerate(tickets)])
        for i, ticket in enumerate(tickets):
            assert same(source.get(ticket.commit(), verify=True)["x"], rows[i : i + 1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_screens(width: int, dtype: str) -> None:
    rows = values(37, width, dtype)
    assert screen(rows.cuda()) == bad_rows(rows)


def test_kernels_are_there() -> None:
    assert _native.load().fast.hsx_kernels_missing() == b""

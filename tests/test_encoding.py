"""`?encode=`: what arrives, on the CPU; tests/gpu/test_gpu_encoding.py holds the kernels to the same bytes."""

from __future__ import annotations

import pytest

import hsxfer
from hsxfer.encoding import encode_torch, split_fp8
from hsxfer.layout import encoded_row_bytes

torch = pytest.importorskip("torch")


def test_fp8_keeps_three_bits_of_every_row(store: str) -> None:
    rows = torch.randn(200, 333, dtype=torch.float32) * torch.logspace(-20, 20, 200)[:, None]
    for dtype in (torch.bfloat16, torch.float32):
        sent = rows.to(dtype)
        with hsxfer.open_sink(store + "?capacity=4MiB&encode=fp8") as sink, hsxfer.open_source(store) as source:
            handle = sink.put({"x": sent}, token_ids=list(range(200)))
            sink.flush()
            assert sink.stats()["payload_bytes"] == 200 * (encoded_row_bytes("fp8", 333) + 8)
            sample = source.get(handle)
            got = sample["x"]
            assert got.dtype == dtype
            assert got.shape == sent.shape
            # Half of the last of three bits, or what is left below the smallest normal number, plus bfloat16's own rounding.
            largest = sent.float().abs().amax(1, keepdim=True)
            wrong = (got.float() - sent.float()).abs() > sent.float().abs() * (1 / 16 + 1 / 200) + largest * 2**-18
            assert not wrong.any()
            assert sample.token_ids.tolist() == list(range(200))


def test_what_is_no_number_stays_none(store: str) -> None:
    rows = torch.ones(4, 40)
    rows[1, 3], rows[2, 5], rows[3] = torch.inf, torch.nan, 0
    with hsxfer.open_sink(store + "?capacity=4MiB&encode=fp8") as sink, hsxfer.open_source(store) as source:
        got = source.get(sink.put({"x": rows}))["x"]
    assert got.isfinite().all(1).tolist() == [True, False, False, True]
    assert got.isfinite().sum() == 4 * 40 - 2
    assert torch.allclose(got[1, 4:], torch.ones(36))
    assert not got[3].any()


def test_raw(store: str) -> None:
    rows = torch.randn(50, 30).to(torch.bfloat16)
    with hsxfer.open_sink(store + "?capacity=4MiB&encode=fp8") as sink, hsxfer.open_source(store) as source:
        raw = source.get(sink.put({"x": rows}), raw=True)["x"]
        assert torch.equal(raw, encode_torch(rows, "fp8"))
        values, scales = split_fp8(raw, 30)
        assert values.dtype == torch.float8_e4m3fn
        assert torch.allclose(scales, rows.float().abs().amax(1) / 448)
        flat = source.get(sink.put({"x": rows}), raw=True, framework="numpy")["x"]
        assert flat.shape == (50, encoded_row_bytes("fp8", 30))


def test_bf16_and_integers(store: str) -> None:
    rows, ids = torch.randn(50, 30), torch.arange(100).reshape(50, 2)
    with hsxfer.open_sink(store + "?capacity=4MiB&encode=bf16") as sink, hsxfer.open_source(store) as source:
        sample = source.get(sink.put({"x": rows, "ids": ids, "half": rows.half(), "b": rows.bfloat16()}))
        assert torch.equal(sample["x"], rows.bfloat16().float())
        assert torch.equal(sample["half"], rows.half().bfloat16().half())
        assert torch.equal(sample["ids"], ids)
        assert torch.equal(sample["b"], rows.bfloat16())


def test_chunks_parts_and_shards(store: str) -> None:
    rows = torch.randn(100, 6, 5)
    sinks = [
        hsxfer.open_sink(store + "?capacity=4MiB&encode=fp8", hsxfer.Rank(tp=(i, 2)), "shard", instance="one")
        for i in range(2)
    ]
    tickets = [sink.begin("s", {"x": ((100, 6, 5), "float32")}) for sink in sinks]
    for start, stop in ((0, 60), (60, 100)):
        for ticket in tickets:
            ticket.write("x", start, rows[start:stop])
    for ticket in tickets:
        ticket.commit()
    with hsxfer.open_source(store) as source:
        got = source.get("s", rows=slice(20, 80))["x"]
        assert got.shape == (60, 6, 5)
        assert torch.allclose(got, rows[20:80], rtol=0.07, atol=0.02)
    for sink in sinks:
        sink.close()


def test_numpy_senders_and_readers(store: str) -> None:
    import numpy

    rows = numpy.random.default_rng(0).standard_normal((20, 16), dtype="float32")
    with hsxfer.open_sink(store + "?capacity=4MiB&encode=fp8") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": rows[::2]})
        with pytest.raises(hsxfer.ConfigError, match="framework='torch' or raw=True"):
            source.get(handle, framework="numpy")
        assert numpy.allclose(source.get(handle)["x"].numpy(), rows[::2], rtol=0.07, atol=0.02)

"""Protocols without a GPU: `__cuda_array_interface__`, DLPack, watermarks, and what a machine without CUDA says."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import numpy as np
import pytest
from stores import store_dir

import hsxfer
from hsxfer.arena import ArenaReader
from hsxfer.foreign import HOST, read_foreign
from hsxfer.layout import MARKED_BYTES
from hsxfer.tensors import rows_of

NO_CUDA = pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a libcuda here")


class OnGpu:
    """What cupy's arrays and numba's say of themselves."""

    def __init__(self, **told: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4, 6),
            "typestr": "<f4",
            "data": (0x7F00_0000, False),
            "version": 3,
            **told,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 3


class OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_cuda_array_interface() -> None:
    rows = rows_of(OnGpu(stream=7))
    assert (rows.pointer, rows.stride_bytes, rows.row_bytes, rows.num_rows) == (0x7F00_0000, 24, 24, 4)
    assert (rows.dtype, rows.device, rows.stream) == ("float32", 3, 7)
    strided = rows_of(OnGpu(strides=(96, 4), stream=None))
    assert (strided.stride_bytes, strided.row_bytes, strided.stream) == (96, 24, 0)


@pytest.mark.parametrize(
    "told", [{"typestr": ">f4"}, {"typestr": "|V2"}, {"mask": 1}, {"strides": (4, 16)}, {"shape": ()}]
)
def test_what_cannot_be_sent_is_said(told: dict[str, Any]) -> None:
    with pytest.raises(hsxfer.ConfigError):
        rows_of(OnGpu(**told))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8", "bool", "complex64"])
def test_dlpack(store: str, dtype: str) -> None:
    array = np.arange(60).reshape(10, 6).astype(dtype)
    foreign = read_foreign(OnlyDlpack(array))
    assert foreign is not None
    assert (foreign.shape, foreign.dtype, foreign.device) == ((10, 6), dtype, HOST)
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": OnlyDlpack(array[::2]), "y": OnlyDlpack(array[:5])})
        sample = source.get(handle, framework="numpy", verify=True)
        assert np.array_equal(sample["x"], array[::2])
        assert np.array_equal(sample["y"], array[:5])


def test_watermarks_count_the_rows_that_landed(store: str) -> None:
    row_bytes = MARKED_BYTES // 4
    rows = np.ones((10, row_bytes), "uint8")
    with hsxfer.open_sink(store + "?capacity=64MiB") as sink:
        ticket = sink.begin("s", {"x": (rows.shape, "uint8")})
        (path,) = _arenas(store)
        reader = ArenaReader(path)

        def words() -> list[int]:
            sink.flush()
            lease = reader.lease(b"s", False, 1.0, early=True)
            assert lease.unfinished
            offset, rows_per_mark = lease.head["tensors"]["x"]["marks"]
            assert rows_per_mark == 4
            found = (ctypes.c_uint64 * 3).from_address(lease.address(offset, 24))[:]
            lease.release()
            return found

        assert words() == [0, 0, 0]
        ticket.write("x", 3, rows[3:9])
        assert words() == [1, 4, 1]
        ticket.write("x", 0, rows[:4])  # row 3 again: a reader sees that the word says too much
        assert words() == [5, 4, 1]
        ticket.write("x", 9, rows[9:])
        assert words() == [5, 4, 2]
        ticket.commit()
        reader.close()


def _arenas(store: str) -> list[str]:
    return [str(path).removesuffix(".arena") for path in store_dir(store).glob("*.arena")]


def test_small_samples_have_no_watermarks(store: str) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": np.ones((10, 10))})
        with source.get(handle, framework="numpy") as sample:
            assert "marks" not in sample._parts[0].lease.head["tensors"]["x"]


@NO_CUDA
def test_a_machine_without_cuda_says_so_and_nothing_is_used_up(store: str) -> None:
    with pytest.raises(hsxfer.TransportUnavailable, match="libcuda"):
        hsxfer.open_sink(store + "?capacity=1MiB&device=cuda:0")
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": np.ones((3, 4))})
        with pytest.raises(hsxfer.TransportUnavailable, match="libcuda"):
            source.get(handle, device="cuda:0")
        with pytest.raises(hsxfer.TransportUnavailable, match="libcuda"):
            sink.put({"x": OnGpu()})
        assert source.get(handle, framework="numpy")["x"].shape == (3, 4)


@pytest.mark.parametrize("option", ["device=gpu", "device=cuda", "device=cuda:x", "encode=fp4", "encode="])
def test_options_are_checked(store: str, option: str) -> None:
    with pytest.raises(hsxfer.ConfigError, match=option.partition("=")[0]):
        hsxfer.open_sink(f"{store}?{option}")

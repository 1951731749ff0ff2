"""Tensors of frameworks that hsxfer does not know: `__cuda_array_interface__` and DLPack, read without importing any of them."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from .errors import ConfigError

HOST = -1  # in place of a device's ordinal

_KINDS = {"f": "float", "i": "int", "u": "uint", "b": "bool", "c": "complex"}
# DLPack's type codes, with bits where the name has them.
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_DLPACK_NAMES = {6: "bool", 10: "float8_e4m3fn", 11: "float8_e4m3fnuz", 12: "float8_e5m2", 13: "float8_e5m2fnuz"}
_DLPACK_HOST, _DLPACK_CUDA, _DLPACK_CUDA_HOST = 1, 2, 3


class Foreign(NamedTuple):
    """`strides` in bytes; `stream` is the one whose work so far the data may still depend on; `owner` keeps the memory."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    stream: int
    owner: Any


def read_foreign(tensor: Any) -> Foreign | None:
    """None for an object that has neither protocol."""
    if hasattr(tensor, "__cuda_array_interface__"):
        return _cuda_array(tensor)
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return _dlpack(tensor)
    return None


def _cuda_array(tensor: Any) -> Foreign:
    told = tensor.__cuda_array_interface__
    kind, size = told["typestr"][1], int(told["typestr"][2:])
    if told["typestr"][0] == ">" or kind not in _KINDS:
        raise ConfigError(f"a {type(tensor).__name__} of {told['typestr']!r} cannot be sent; convert it first")
    if told.get("mask") is not None:
        raise ConfigError(f"a {type(tensor).__name__} with a mask cannot be sent")
    shape = tuple(told["shape"])
    if hasattr(tensor, "__dlpack_device__"):
        device = int(tensor.__dlpack_device__()[1])
    else:
        device = int(getattr(getattr(tensor, "device", None), "id", 0))
    dtype = "bool" if kind == "b" else f"{_KINDS[kind]}{8 * size}"
    strides = told.get("strides") or _contiguous(shape, size)
    return Foreign(told["data"][0], shape, tuple(strides), dtype, device, told.get("stream") or 0, tensor)


class _Tensor(ctypes.Structure):  # DLTensor of DLPack 0.2 to 1.x
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _dlpack(tensor: Any) -> Foreign:
    on_gpu = int(tensor.__dlpack_device__()[0]) == _DLPACK_CUDA
    # 1 is the legacy default stream: what the producer still computes is ordered before it.
    capsule = tensor.__dlpack__(stream=1) if on_gpu else tensor.__dlpack__()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    raw = _Tensor.from_address(get_pointer(capsule, b"dltensor"))
    if raw.device_type not in (_DLPACK_HOST, _DLPACK_CUDA, _DLPACK_CUDA_HOST) or raw.lanes != 1:
        raise ConfigError(f"a {type(tensor).__name__} on DLPack device {raw.device_type} cannot be sent")
    dtype = _DLPACK_NAMES.get(raw.code) or f"{_DLPACK_KINDS.get(raw.code, 'unknown')}{raw.bits}"
    size = (raw.bits + 7) // 8
    shape = tuple(raw.shape[: raw.ndim])
    strides = tuple(step * size for step in raw.strides[: raw.ndim]) if raw.strides else _contiguous(shape, size)
    device = raw.device_id if on_gpu else HOST
    # An unused capsule frees its tensor when it dies, which is what an owner is for.
    return Foreign((raw.data or 0) + raw.byte_offset, shape, strides, dtype, device, 0, capsule)


def _contiguous(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(size)
        size *= extent
    return tuple(reversed(strides))

"""torch and numpy <-> (pointer, bytes, dtype): the only file that touches them. Both are imported when first needed, never before."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from .errors import ConfigError
from .handle import ITEM_BYTES

FRAMEWORKS = ("torch", "numpy")
# Where a conjugate or negative bit can be, in place of changed bytes: complex tensors, and the imaginary part of a conjugate.
_MAY_BE_LAZY = {"complex128", "complex64", "complex32", "float64", "float32", "float16"}


class Rows(NamedTuple):
    """A tensor as rows of bytes. `owner` keeps the memory alive; it is a copy where the rows themselves were not contiguous."""

    pointer: int
    stride_bytes: int
    row_bytes: int
    num_rows: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any


def rows_of(tensor: Any) -> Rows:
    """A torch tensor, numpy array or anything with the buffer protocol. Raises `ConfigError` naming what cannot be sent.

    Rows may be strided (a slice of a wider tensor, every second row, an expanded row); a row in itself must be contiguous,
    else the tensor is copied first.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_rows(torch, tensor)
    numpy = _numpy()
    if not isinstance(tensor, numpy.ndarray):
        try:
            tensor = numpy.asarray(memoryview(tensor))
        except TypeError:
            raise ConfigError(
                f"{type(tensor).__name__} is no tensor: pass a torch tensor, a numpy array or a buffer"
            ) from None
    return _numpy_rows(numpy, tensor)


def _torch_rows(torch: Any, tensor: Any) -> Rows:
    dtype = _torch_names().get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise ConfigError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent; convert it first")
    if not tensor.is_cpu:
        raise ConfigError(f"this transport takes tensors in host memory, not on {tensor.device}")
    shape = tuple(tensor.shape)
    if not shape:
        raise ConfigError("a tensor needs at least one dimension, its rows; this one has none")
    if dtype in _MAY_BE_LAZY and _is_lazy(torch, tensor):
        tensor = tensor.resolve_conj().resolve_neg()
    item = ITEM_BYTES[dtype]
    row_bytes = math.prod(shape[1:]) * item
    if tensor.is_contiguous():
        return Rows(tensor.data_ptr(), row_bytes, row_bytes, shape[0], shape, dtype, tensor)
    stride = tensor.stride()
    if not _row_contiguous(shape, stride):
        tensor = tensor.contiguous()
        return Rows(tensor.data_ptr(), row_bytes, row_bytes, shape[0], shape, dtype, tensor)
    return Rows(tensor.data_ptr(), stride[0] * item, row_bytes, shape[0], shape, dtype, tensor)


def _is_lazy(torch: Any, tensor: Any) -> bool:
    """`is_conj() or is_neg()`, which drop the GIL: each costs up to 5 ms beside a busy Python thread."""
    keys, key = torch._C._dispatch_keys(tensor), torch._C.DispatchKey
    return bool(keys.has(key.Conjugate) or keys.has(key.Negative))


def _numpy_rows(numpy: Any, array: Any) -> Rows:
    dtype = array.dtype.name
    if dtype not in ITEM_BYTES or not array.dtype.isnative:
        raise ConfigError(f"a numpy array of {array.dtype!r} cannot be sent; convert it first")
    if array.ndim == 0:
        raise ConfigError("a tensor needs at least one dimension, its rows; this one has none")
    item = ITEM_BYTES[dtype]
    strides = tuple(stride // item for stride in array.strides)
    if array.strides[0] < 0 or array.strides[0] % item or not _row_contiguous(array.shape, strides):
        array = numpy.ascontiguousarray(array)
    shape = tuple(array.shape)
    return Rows(array.ctypes.data, array.strides[0], math.prod(shape[1:]) * item, shape[0], shape, dtype, array)


def _row_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for extent, step in zip(reversed(shape[1:]), reversed(stride[1:]), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def check_framework(framework: str, device: str) -> None:
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework {framework!r} is not one of {', '.join(FRAMEWORKS)}")
    if str(device) != "cpu":
        raise ConfigError(
            f"device {str(device)!r}: this transport delivers to host memory; use device='cpu' and move the tensor"
        )


def view(framework: str, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor over `memory` (a ctypes array, which the tensor keeps alive); read-only where the framework knows of it."""
    if framework == "numpy":
        array = _numpy().frombuffer(memory, dtype="uint8").view(_numpy_dtype(dtype)).reshape(shape)
        array.flags.writeable = False
        return array
    torch = _torch()
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(memory, dtype=torch.uint8).view(getattr(torch, dtype)).view(shape)


def empty(framework: str, dtype: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    """An uninitialised tensor of its own memory, and its address."""
    if framework == "numpy":
        array = _numpy().empty(shape, dtype=_numpy_dtype(dtype))
        return array, array.ctypes.data
    torch = _torch()
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    return tensor, tensor.data_ptr()


def memory_at(address: int, num_bytes: int, keep: Any) -> Any:
    """A ctypes array over foreign memory; `keep` lives as long as the array, so as long as any tensor made from it."""
    memory = (ctypes.c_char * num_bytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]
    return memory


def bad_rows(tensor: Any) -> tuple[list[int], list[int]]:
    """Row numbers that hold a NaN or an infinity, and row numbers that are all zero. Floating-point tensors of either framework."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        flat = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
        flat = flat.float() if flat.is_floating_point() else flat
        return (~flat.isfinite()).any(1).nonzero().flatten().tolist(), (flat == 0).all(1).nonzero().flatten().tolist()
    numpy = _numpy()
    flat = tensor.reshape(len(tensor), -1).astype("float32")
    return numpy.flatnonzero(~numpy.isfinite(flat).all(1)).tolist(), numpy.flatnonzero((flat == 0).all(1)).tolist()


@cache
def _torch_names() -> dict[Any, str]:
    torch = _torch()
    return {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}


def _numpy_dtype(name: str) -> Any:
    try:
        return _numpy().dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        return _numpy().dtype(getattr(ml_dtypes, name))
    except ImportError:
        raise ConfigError(f"numpy has no {name}: pip install ml_dtypes, or use framework='torch'") from None
    except AttributeError:
        raise ConfigError(f"numpy has no {name}: use framework='torch'") from None


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ConfigError("framework='torch' needs torch installed; framework='numpy' needs numpy only") from None
    return torch


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ConfigError("this needs numpy installed: pip install numpy") from None
    return numpy

"""torch, numpy and plain buffers <-> (pointer, bytes, dtype): the only file that touches them.

torch and numpy are imported when first needed, never before; a program that passes buffers and asks for memoryviews needs neither.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from .errors import ConfigError
from .foreign import HOST, Foreign, read_foreign
from .handle import ITEM_BYTES

FRAMEWORKS = ("torch", "numpy", "cupy", "memoryview")
# Where a conjugate or negative bit can be, in place of changed bytes: complex tensors, and the imaginary part of a conjugate.
_MAY_BE_LAZY = {"complex128", "complex64", "complex32", "float64", "float32", "float16"}
# Format characters of the buffer protocol; their size is what the buffer says.
_BUFFER_KINDS = {"bool": "?", "int": "bhilqn", "uint": "BHILQNc", "float": "efd"}


class Rows(NamedTuple):
    """A tensor as rows of bytes. `owner` keeps the memory alive; it is a copy where the rows themselves were not contiguous."""

    pointer: int
    stride_bytes: int
    row_bytes: int
    num_rows: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any
    device: int = HOST  # ordinal of the GPU it is on
    stream: int = 0  # of that GPU: the rows are good after what it holds now


def rows_of(tensor: Any, snapshot: bool = False) -> Rows:
    """A torch tensor, numpy array or anything with `__cuda_array_interface__`, DLPack or the buffer protocol. Raises `ConfigError`
    naming what cannot be sent.

    Rows may be strided (a slice of a wider tensor, every second row, an expanded row); a row in itself must be contiguous,
    else the tensor is copied first. `snapshot=True` copies it in any case: on a GPU on the caller's stream, into memory of
    torch's or cupy's pool, so without an allocation once the pool has grown.
    """
    if snapshot:
        tensor = _copy_of(tensor)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _torch_rows(torch, tensor)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _numpy_rows(numpy, tensor)
    foreign = read_foreign(tensor)
    if foreign is not None:
        return _foreign_rows(tensor, foreign)
    try:
        buffer = memoryview(tensor)
    except TypeError:
        raise ConfigError(
            f"{type(tensor).__name__} is no tensor: pass a torch tensor, a numpy or cupy array, or a buffer"
        ) from None
    return _buffer_rows(buffer)


def _torch_rows(torch: Any, tensor: Any) -> Rows:
    dtype = _torch_names().get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise ConfigError(f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent; convert it first")
    device, stream = HOST, 0
    if not tensor.is_cpu:
        if not tensor.is_cuda:
            raise ConfigError(f"tensors are sent from host memory and from CUDA devices, not from {tensor.device}")
        device = tensor.get_device()
        stream = _current_stream(torch, device)
    shape = tuple(tensor.shape)
    if not shape:
        raise ConfigError("a tensor needs at least one dimension, its rows; this one has none")
    if dtype in _MAY_BE_LAZY and _is_lazy(torch, tensor):
        tensor = tensor.resolve_conj().resolve_neg()
    item = ITEM_BYTES[dtype]
    row_bytes = math.prod(shape[1:]) * item
    stride_bytes = row_bytes
    if not tensor.is_contiguous():
        if _row_contiguous(shape, tensor.stride()):
            stride_bytes = tensor.stride()[0] * item
        else:
            tensor = tensor.contiguous()
    return Rows(tensor.data_ptr(), stride_bytes, row_bytes, shape[0], shape, dtype, tensor, device, stream)


def _current_stream(torch: Any, device: int) -> int:
    try:
        return int(torch._C._cuda_getCurrentRawStream(device))  # 0.1 us; the public way makes an object in 3
    except AttributeError:
        return int(torch.cuda.current_stream(device).cuda_stream)


def _copy_of(tensor: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    if hasattr(tensor, "copy"):  # numpy, cupy
        return tensor.copy()
    raise ConfigError(f"a {type(tensor).__name__} has no copy() to take a snapshot with")


def _foreign_rows(tensor: Any, foreign: Foreign) -> Rows:
    if foreign.dtype not in ITEM_BYTES:
        raise ConfigError(f"a {type(tensor).__name__} of {foreign.dtype} cannot be sent; convert it first")
    if not foreign.shape:
        raise ConfigError("a tensor needs at least one dimension, its rows; this one has none")
    item = ITEM_BYTES[foreign.dtype]
    strides = tuple(stride // item for stride in foreign.strides)
    if foreign.strides[0] < 0 or not _row_contiguous(foreign.shape, strides):
        raise ConfigError(f"the rows of this {type(tensor).__name__} are not contiguous; make them so first")
    row_bytes = math.prod(foreign.shape[1:]) * item
    rows = (foreign.pointer, foreign.strides[0], row_bytes, foreign.shape[0], foreign.shape, foreign.dtype)
    return Rows(*rows, foreign.owner, foreign.device, foreign.stream)


def cuda_device_in_use() -> int | None:
    """torch's current device if this process uses CUDA through torch already; asks without starting CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


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


def _buffer_rows(buffer: memoryview) -> Rows:
    """Needs no numpy: token ids go this way, and the tensors of a program that has none."""
    kind = next((kind for kind, codes in _BUFFER_KINDS.items() if buffer.format.lstrip("@=<") in codes), None)
    if kind is None:
        raise ConfigError(f"a buffer of format {buffer.format!r} cannot be sent; convert it first")
    dtype = kind if kind == "bool" else f"{kind}{8 * buffer.itemsize}"
    shape = tuple(buffer.shape or ())
    if not shape:
        raise ConfigError("a tensor needs at least one dimension, its rows; this one has none")
    if buffer.readonly or not buffer.c_contiguous:  # Python tells the address of writable memory only
        buffer = memoryview(bytearray(buffer))
    pointer = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer.nbytes else 0
    row_bytes = math.prod(shape[1:]) * ITEM_BYTES[dtype]
    return Rows(pointer, row_bytes, row_bytes, shape[0], shape, dtype, buffer)


def _row_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for extent, step in zip(reversed(shape[1:]), reversed(stride[1:]), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def check_framework(framework: str) -> None:
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework {framework!r} is not one of {', '.join(FRAMEWORKS)}")
    if framework != "memoryview":
        _torch() if framework == "torch" else _numpy()


def check_dtype(framework: str, name: str) -> None:
    """Raises `ConfigError` if `framework` cannot hold this dtype."""
    dtype_of(framework, name)


def view(framework: str, memory: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor over `memory` (a ctypes array, which the tensor keeps alive); read-only where the framework knows of it."""
    if framework == "numpy":
        array = _numpy().frombuffer(memory, dtype="uint8").view(dtype_of(framework, dtype)).reshape(shape)
        array.flags.writeable = False
        return array
    if framework == "memoryview":
        return _shaped(memoryview(memory).toreadonly(), dtype, shape)
    torch = _torch()
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype_of(framework, dtype))
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype_of(framework, dtype)).view(shape)


def empty(framework: str, dtype: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    """An uninitialised tensor of its own memory, and its address."""
    if framework == "numpy":
        array = _numpy().empty(shape, dtype=dtype_of(framework, dtype))
        return array, array.ctypes.data
    if framework == "memoryview":
        memory = (ctypes.c_char * (math.prod(shape) * ITEM_BYTES[dtype]))()
        return _shaped(memoryview(memory), dtype, shape), ctypes.addressof(memory)
    tensor = _torch().empty(shape, dtype=dtype_of(framework, dtype))
    _ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor, tensor.data_ptr()


def _ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """For fresh memory, as numpy does by itself: its faults, 4 KiB each, take longer than the copy that they interrupt."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if num_bytes >= 4 << 20:
        _madvise()(start, address + num_bytes - start, mmap.MADV_HUGEPAGE)  # advice: what comes of it does not matter


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _shaped(memory: memoryview, dtype: str, shape: tuple[int, ...]) -> memoryview:
    """Python has no memoryview of several dimensions without elements: that one comes flat."""
    flat = memory.cast("B")
    return flat.cast(dtype_of("memoryview", dtype), shape) if flat.nbytes else flat.cast(dtype_of("memoryview", dtype))


def memory_at(address: int, num_bytes: int, keep: Any) -> Any:
    """A ctypes array over foreign memory; `keep` lives as long as the array, so as long as any tensor made from it."""
    memory = (ctypes.c_char * num_bytes).from_address(address)
    memory.keep = keep  # type: ignore[attr-defined]
    return memory


def bad_rows(tensor: Any) -> tuple[list[int], list[int]]:
    """Row numbers that hold a NaN or an infinity, and row numbers that are all zero. Floating-point tensors of torch or numpy."""
    if isinstance(tensor, memoryview):
        raise ConfigError("this check needs framework='torch' or 'numpy'")
    if math.prod(tensor.shape) == 0:
        return [], []
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        flat = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
        flat = flat.float() if flat.element_size() < 4 else flat
        return (~flat.isfinite()).any(1).nonzero().flatten().tolist(), (flat == 0).all(1).nonzero().flatten().tolist()
    numpy = _numpy()
    flat = tensor.reshape(len(tensor), -1)
    flat = flat.astype("float32") if flat.itemsize < 4 else flat
    return numpy.flatnonzero(~numpy.isfinite(flat).all(1)).tolist(), numpy.flatnonzero((flat == 0).all(1)).tolist()


@cache
def _torch_names() -> dict[Any, str]:
    torch = _torch()
    return {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}


@cache
def dtype_of(framework: str, name: str) -> Any:
    if framework in ("numpy", "cupy"):
        return _numpy_dtype(name)
    if framework == "torch":
        if not hasattr(_torch(), name):
            raise ConfigError(f"this torch has no {name}")
        return getattr(_torch(), name)
    size = ITEM_BYTES[name]
    if name.startswith("complex"):
        raise ConfigError(f"memoryview has no {name}: use framework='numpy' or 'torch'")
    if name in ("float32", "float64", "bool"):
        return {"float32": "f", "float64": "d", "bool": "?"}[name]
    code = {1: "b", 2: "h", 4: "i", 8: "q"}[size]
    return code if name.startswith("int") else code.upper()  # of narrow floats the bits


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

"""The CUDA half of tensors.py: tensors on a GPU for a consumer, in the memory pools of torch or cupy."""

from __future__ import annotations

import re
import sys
from typing import Any

from .errors import ConfigError
from .foreign import HOST
from .tensors import dtype_of


def parse_device(framework: str, device: Any) -> int:
    """The ordinal of a GPU, or `HOST`. Raises `ConfigError`. cupy knows GPUs only: without a device it means its current one."""
    name = str(device)
    if framework == "cupy" and name in ("cpu", "cuda"):
        return int(_cupy().cuda.Device().id)
    if name == "cpu":
        return HOST
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if not match:
        raise ConfigError(f"device {name!r} is neither cpu nor cuda:N")
    if framework not in ("torch", "cupy"):
        raise ConfigError(f"framework {framework!r} has no tensors on {name}; use torch or cupy")
    if match[1] is None:
        return int(torch_or_error().cuda.current_device())
    return int(match[1])


def empty_on(framework: str, device: int, stream: int, dtype: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    """An uninitialised tensor whose memory `stream` may write at once, and its address.

    torch: allocated on `stream`, so that a copy need not wait for what the trainer has queued on its own; `used_here` then
    tells the allocator of the caller's stream. cupy's pool knows no such thing: there the caller's stream is waited for, as it may
    still be using what the pool gives out again.
    """
    if framework == "torch":
        torch = torch_or_error()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            tensor = torch.empty(shape, dtype=dtype_of("torch", dtype), device=f"cuda:{device}")
        return tensor, tensor.data_ptr()
    cupy = _cupy()
    with cupy.cuda.Device(device):
        array = cupy.empty(shape, dtype=dtype_of("numpy", dtype))
        cupy.cuda.get_current_stream().synchronize()
    return array, int(array.data.ptr)


def bytes_on(like: Any, device: int, shape: tuple[int, int]) -> tuple[Any, int]:
    """uint8 memory on a GPU for the caller's current stream, from the pool of the framework that `like` is of; and its address."""
    torch = sys.modules.get("torch")
    if torch is not None and (isinstance(like, torch.Tensor) or "cupy" not in sys.modules):
        tensor = torch.empty(shape, dtype=torch.uint8, device=f"cuda:{device}")
        return tensor, tensor.data_ptr()
    cupy = _cupy()
    with cupy.cuda.Device(device):
        array = cupy.empty(shape, dtype="uint8")
    return array, int(array.data.ptr)


def wait_for_stream(device: int, stream: int) -> None:
    """The caller's current stream goes on behind what `stream` holds now."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.current_stream(device).wait_stream(torch.cuda.ExternalStream(stream, device=device))
    else:
        _cupy().cuda.ExternalStream(stream).synchronize()


def used_here(tensor: Any) -> None:
    """The caller's current stream uses the tensor from now on: its memory is given out again only after what that stream holds then."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def torch_or_error() -> Any:
    try:
        import torch
    except ImportError:
        raise ConfigError("framework='torch' needs torch installed; framework='cupy' needs cupy only") from None
    return torch


def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise ConfigError("framework='cupy' needs cupy installed: pip install cupy-cuda13x") from None
    return cupy

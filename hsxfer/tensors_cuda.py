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
        return int(_torch().cuda.current_device())
    return int(match[1])


def empty_on(framework: str, device: int, stream: int, dtype: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    """An uninitialised tensor whose memory `stream` may write at once, and its address.

    torch: allocated on `stream`, so that a copy need not wait for what the trainer has queued on its own; `used_here` then
    tells the allocator of the caller's stream. cupy's pool knows no such thing: there the caller's stream is waited for, as it may
    still be using what the pool gives out again.
    """
    if framework == "torch":
        torch = _torch()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            tensor = torch.empty(shape, dtype=dtype_of("torch", dtype), device=f"cuda:{device}")
        return tensor, tensor.data_ptr()
    cupy = _cupy()
    with cupy.cuda.Device(device):
        array = cupy.empty(shape, dtype=dtype_of("numpy", dtype))
        cupy.cuda.get_current_stream().synchronize()
    return array, int(array.data.ptr)


def used_here(tensor: Any) -> None:
    """The caller's current stream uses the tensor from now on: its memory is given out again only after what that stream holds then."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _torch() -> Any:
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

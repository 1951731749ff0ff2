"""Narrower elements for the way (`?encode=fp8`, `?encode=bf16`), a row at a time, so that rows still go by position and have digests.

fp8: a row of `width` elements is `width` bytes of e4m3, zeros, and in its last 4 bytes the float scale that they are multiplied with:
the row's largest magnitude / 448. NaN and infinity become NaN. bf16: each element rounded to the nearest. Kernels do this on a GPU
(csrc/kernels/encode.cuh), torch elsewhere, with the same bytes.
"""

from __future__ import annotations

from typing import Any

from . import _native
from .errors import ConfigError
from .foreign import HOST
from .layout import encoded_row_bytes
from .tensors import Rows, bad_rows, dtype_of, memory_at, rows_of
from .tensors_cuda import bytes_on, torch_or_error

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_FP8_MAX, _SMALLEST_MAX = 448.0, 1e-30


def encode(rows: Rows, encoding: str) -> Rows:
    """Rows of bytes in memory of their own; on a GPU computed on the stream that `rows` are good after."""
    width = rows.row_bytes // (4 if rows.dtype == "float32" else 2)
    row_bytes = encoded_row_bytes(encoding, width)
    if rows.device == HOST:
        torch = torch_or_error()
        out = encode_torch(_tensor_of(torch, rows, width), encoding)
        address = out.data_ptr()
    else:
        out, address = bytes_on(rows.owner, rows.device, (rows.num_rows, row_bytes))
        kernel = f"{_SHORT[rows.dtype]}_to_{encoding}"
        run(
            rows.device,
            rows.stream,
            kernel,
            rows.pointer,
            rows.stride_bytes,
            address,
            row_bytes,
            width,
            row_bytes,
            rows.num_rows,
        )
    return rows._replace(pointer=address, stride_bytes=row_bytes, row_bytes=row_bytes, owner=(out, rows.owner))


def run(
    device: int,
    stream: int,
    kernel: str,
    source: int,
    source_stride: int,
    target: int,
    target_stride: int,
    width: int,
    row_bytes: int,
    num_rows: int,
) -> None:
    """Queues a kernel of csrc/kernels/encode.cuh. Raises `TransportUnavailable` if this build has none."""
    library = _native.load()
    library.check(
        library.fast.hsx_submit_encode(
            *(device, stream, kernel.encode(), source, source_stride, target, target_stride),
            *(width, row_bytes, num_rows),
        )
    )


def encode_torch(tensor: Any, encoding: str) -> Any:
    """uint8 `[rows, row_bytes]` from `[rows, width]`."""
    torch = torch_or_error()
    if encoding == "bf16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint8)
    rows, width = tensor.shape
    values = tensor.float()
    finite = values.isfinite()
    largest = values.abs().where(finite, torch.zeros(())).amax(1, keepdim=True) if width else values.new_zeros(rows, 1)
    largest = largest.clamp(min=_SMALLEST_MAX)
    full = torch.full_like(
        largest, _FP8_MAX
    )  # a number over a tensor is a product with its reciprocal, which rounds twice
    scaled = (values * (full / largest)).clamp(-_FP8_MAX, _FP8_MAX).where(finite, torch.full((), torch.nan))
    out = torch.zeros(rows, encoded_row_bytes("fp8", width), dtype=torch.uint8)
    out[:, :width] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    out[:, :width][~finite] = 0x7F
    out[:, -4:] = (largest / full).view(torch.uint8)
    return out


def decode_torch(raw: Any, encoding: str, dtype: str, width: int) -> Any:
    """`[rows, width]` of `dtype` from uint8 `[rows, row_bytes]`."""
    torch = torch_or_error()
    if encoding == "bf16":
        return raw.view(torch.bfloat16).to(dtype_of("torch", dtype))
    values, scales = split_fp8(raw, width)
    return (values.float() * scales[:, None]).to(dtype_of("torch", dtype))


def split_fp8(raw: Any, width: int) -> tuple[Any, Any]:
    """Views of what `get(raw=True)` gives for fp8: float8_e4m3fn `[rows, width]`, and its float32 scales `[rows]`."""
    torch = torch_or_error()
    return raw[:, :width].view(torch.float8_e4m3fn), raw[:, -4:].contiguous().view(torch.float32)[:, 0]


def decode_on(
    device: int,
    stream: int,
    encoding: str,
    dtype: str,
    raw: int,
    row_bytes: int,
    target: int,
    width: int,
    num_rows: int,
) -> None:
    """The same by kernel, between addresses of a GPU."""
    if dtype not in _SHORT:
        raise ConfigError(f"{encoding} does not become {dtype}")
    size = 4 if dtype == "float32" else 2
    run(
        device,
        stream,
        f"{encoding}_to_{_SHORT[dtype]}",
        raw,
        row_bytes,
        target,
        size * width,
        width,
        row_bytes,
        num_rows,
    )


def _tensor_of(torch: Any, rows: Rows, width: int) -> Any:
    """A torch tensor over the rows, of whatever framework they are."""
    item = rows.row_bytes // max(1, width)
    span = rows.stride_bytes * (rows.num_rows - 1) + rows.row_bytes if rows.num_rows else 0
    if span == 0:
        return torch.empty(rows.num_rows, width, dtype=dtype_of("torch", rows.dtype))
    flat = torch.frombuffer(memory_at(rows.pointer, span, rows.owner), dtype=dtype_of("torch", rows.dtype))
    return flat.as_strided((rows.num_rows, width), (rows.stride_bytes // item, 1))


def screen(tensor: Any) -> tuple[list[int], list[int]]:
    """Row numbers that hold a NaN or an infinity, and row numbers that are all zero: on a GPU one pass of a kernel."""
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if not getattr(tensor, "is_cuda", False) or dtype not in _SHORT or not tensor.numel():
        return bad_rows(tensor)
    library, rows = _native.load(), rows_of(tensor)
    flags, address = bytes_on(tensor, rows.device, (rows.num_rows, 1))
    code = library.fast.hsx_submit_screen(
        *(rows.device, rows.stream, _SHORT[dtype].encode(), rows.pointer, rows.stride_bytes, address),
        *(rows.row_bytes // tensor.element_size(), rows.num_rows),
    )
    if code == _native.UNAVAILABLE:
        return bad_rows(tensor)
    library.check(code)
    told = flags[:, 0].cpu()
    return (told & 1).nonzero().flatten().tolist(), (told & 2).nonzero().flatten().tolist()

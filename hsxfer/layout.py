"""Where the tensors of a sample lie in its slot (docs/format.md, 2.2 and 4). Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import ConfigError
from .handle import ITEM_BYTES, Handle, TensorSpec

ALIGN_BYTES = 256  # a DMA-friendly start for every tensor
MAX_HEAD_BYTES = 1 << 18  # a head is read at every get
# Between two watermarks: a reader on a GPU starts after so many, and ends so many behind.
MARKED_BYTES = 16 << 20
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def encoding_of(wanted: str, dtype: str) -> str:
    """What becomes of a tensor of `dtype` in a sink opened with `encode=wanted`: "none" for what is narrow already, and for integers."""
    applies = dtype in ("float16", "float32") or (dtype == "bfloat16" and wanted == "fp8")
    return wanted if applies else "none"


def encoded_row_bytes(encoding: str, width: int) -> int:
    """See hsxfer/encoding.py."""
    return -(-(width + 4) // 16) * 16 if encoding == "fp8" else 2 * width


class Placement(NamedTuple):
    """One tensor of a part: offsets in bytes from the start of the slot's data."""

    spec: TensorSpec
    offset: int
    row_bytes: int
    rows: int
    digests: int | None
    marks: int = 0
    rows_per_mark: int = 0  # 0: the tensor has no watermarks
    encoding: str = "none"

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "offset": self.offset,
            "row_bytes": self.row_bytes,
            "rows": self.rows,
            "planes": 1,
            "digests": self.digests,
        }
        if self.rows_per_mark:
            told["marks"] = [self.marks, self.rows_per_mark]
        if self.encoding != "none":
            told["encoding"] = self.encoding
        return told


class Layout(NamedTuple):
    """The whole of a part. `payload_bytes` is what counts against the capacity."""

    placements: dict[str, Placement]
    data_bytes: int
    payload_bytes: int
    marks: tuple[int, int] = (0, 0)  # all watermarks: offset, number


def place(
    tensors: Mapping[str, TensorSpec], part_rows: int, digest: bool, marks: bool = False, encode: str = "none"
) -> Layout:
    """Tensors first, in order, 256-byte aligned; behind them their digest tables (one u64 a row), and with `marks` the watermarks of
    those that are worth reading in pieces."""
    placements: dict[str, Placement] = {}
    offset = payload = 0
    for name, spec in tensors.items():
        width, encoding = math.prod(spec.shape[1:]), encoding_of(encode, spec.dtype)
        row_bytes = width * ITEM_BYTES[spec.dtype] if encoding == "none" else encoded_row_bytes(encoding, width)
        placements[name] = Placement(spec, offset, row_bytes, part_rows, None, encoding=encoding)
        payload += part_rows * row_bytes
        offset = _aligned(offset + part_rows * row_bytes)
    if digest:
        for name, at in placements.items():
            placements[name] = at._replace(digests=offset)
            offset += 8 * at.rows
    first_mark = offset
    for name, at in placements.items():
        if marks and at.rows * at.row_bytes >= 2 * MARKED_BYTES and at.rows > 1:
            rows_per_mark = max(1, MARKED_BYTES // at.row_bytes)
            placements[name] = at._replace(marks=offset, rows_per_mark=rows_per_mark)
            offset += 8 * -(-at.rows // rows_per_mark)
    return Layout(placements, offset, payload, (first_mark, (offset - first_mark) // 8))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def encode_head(handle: Handle, layout: Layout, meta: Mapping[str, Any] | None) -> bytes:
    """What the arena says about a sample (docs/format.md, 4). Raises `ConfigError` for a `meta` that is not small JSON."""
    try:
        head = {
            "handle": handle.to_dict(),
            "token_ids": "token_ids" in layout.placements,
            "meta": dict(meta or {}),
            "tensors": {name: placement.to_dict() for name, placement in layout.placements.items()},
        }
        encoded = _ENCODER.encode(head).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"meta must be JSON: {error}") from None
    if len(encoded) > MAX_HEAD_BYTES:
        raise ConfigError(f"the sample's description takes {len(encoded)} bytes, at most {MAX_HEAD_BYTES}")
    return encoded

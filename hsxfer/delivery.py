"""From the parts of a sample to tensors on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .arena import WAIT_SLICE_S, ArenaReader
from .encoding import decode_on
from .errors import HandleError, IntegrityError, TransferTimeout
from .fetch import BadRow, Fetch, GaveUp, Op, stream_of
from .handle import ITEM_BYTES, Handle
from .layout import encoded_row_bytes, encoding_of
from .sample import Part
from .tensors_cuda import empty_on, wait_for_stream


class _Copy(NamedTuple):
    """Rows `[low, high)` of the sample, which lie at `local` and on in a part."""

    name: str
    low: int
    high: int
    local: int


def deliver(
    device: int,
    framework: str,
    names: Sequence[str],
    rows: tuple[int, int],
    readers: Sequence[ArenaReader],
    parts: Sequence[Part],
    check: bool,
    raw: bool,
    must_live: Callable[[], None],
    left_s: Callable[[], float],
) -> dict[str, Any]:
    """The tensors `names`, rows `[rows[0], rows[1])`, when they have landed. Raises `IntegrityError`, `TransferTimeout`, and of a
    sample that was still arriving what became of it. `must_live` raises if the rest will not come."""
    handle = parts[0].handle
    stream = stream_of(device)
    tensors, addresses = {}, {}
    for name in names:
        spec = parts[0].place(name).spec
        shape = (rows[1] - rows[0], *spec.shape[1:])
        tensors[name], addresses[name] = empty_on(framework, device, stream, spec.dtype, shape)
    for reader, part, copies in zip(readers, parts, _visible(handle, names, rows, parts), strict=True):
        ops = [_op(part, copy, addresses[copy.name], rows[0], check) for copy in copies]
        with Fetch(device, reader, part.lease, ops) as fetch:
            try:
                while not fetch.wait(min(left_s(), WAIT_SLICE_S)):
                    must_live()
                    if left_s() <= 0:
                        raise TransferTimeout(f"sample {handle.key!r} has not arrived in the time given")
            except GaveUp:
                reader.lease(handle.key.encode(), False, 0.0).release()  # raises what became of it
                raise
            except BadRow as bad:
                copy = copies[bad.op]
                raise IntegrityError(
                    f"sample {handle.key!r}: row {copy.low + bad.row} of {copy.name!r} differs from what was sent"
                ) from None
    for name in names if not raw else ():
        at, spec = parts[0].place(name), parts[0].specs[name]
        if at.encoding != "none":
            shape = (rows[1] - rows[0], *spec.shape[1:])
            tensor, address = empty_on(framework, device, stream, spec.dtype, shape)
            width = math.prod(spec.shape[1:])
            decode_on(device, stream, at.encoding, spec.dtype, addresses[name], at.row_bytes, address, width, shape[0])
            wait_for_stream(device, stream)
            tensors[name] = tensor
    return tensors


def _visible(handle: Handle, names: Sequence[str], rows: tuple[int, int], parts: Sequence[Part]) -> list[list[_Copy]]:
    """What to copy of each part, no row twice: of two pieces that cover it, the later write's."""
    copies: list[list[_Copy]] = [[] for _ in parts]
    for name in names:
        pieces = [(piece, number) for number, part in enumerate(parts) for piece in part.pieces(name)]
        gaps = [rows] if rows[0] < rows[1] else []
        for (_, first, last, local), number in sorted(pieces, key=lambda pair: -pair[0][0]):
            rest = []
            for start, stop in gaps:
                low, high = max(first, start), min(last, stop)
                if low >= high:
                    rest.append((start, stop))
                    continue
                copies[number].append(_Copy(name, low, high, local + low - first))
                rest += [span for span in ((start, low), (high, stop)) if span[0] < span[1]]
            gaps = rest
        if gaps:
            raise IntegrityError(
                f"sample {handle.key!r}: the parts of {len(parts)} ranks leave rows of {name!r} from {min(gaps)[0]} on open"
            )
    return copies


def _op(part: Part, copy: _Copy, address: int, first_row: int, check: bool) -> Op:
    at, lease, num_rows = part.place(copy.name), part.lease, copy.high - copy.low
    width = math.prod(at.spec.shape[1:]) * ITEM_BYTES[at.spec.dtype]
    logical = part.specs[copy.name]
    if at.encoding != "none":
        width = encoded_row_bytes(at.encoding, math.prod(logical.shape[1:]))
    if at.row_bytes != width or at.encoding not in ("none", encoding_of(at.encoding, logical.dtype)):
        raise HandleError(f"rows of {copy.name!r} have {at.row_bytes} bytes as {at.encoding}, not {width}")
    if copy.local + num_rows > at.rows:
        raise HandleError(
            f"rows {copy.local} to {copy.local + num_rows} of {copy.name!r} are outside of the part's {at.rows}"
        )
    digests = marks = None
    if check and at.digests is not None:
        digests = lease.address(at.digests + 8 * copy.local, 8 * num_rows)
    if lease.unfinished and at.rows_per_mark > 0:
        table = lease.address(at.marks, 8 * -(-at.rows // at.rows_per_mark))
        marks = (table, at.rows_per_mark, copy.local, at.rows)
    source = lease.address(at.offset + copy.local * at.row_bytes, num_rows * at.row_bytes)
    return Op(source, address + (copy.low - first_row) * at.row_bytes, at.row_bytes, num_rows, digests, marks)

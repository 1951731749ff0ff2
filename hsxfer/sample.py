"""A sample as a consumer holds it: tensors over leased memory, or of its own where something had to be copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import _native
from ._native import byref
from .arena import Lease
from .encoding import decode_torch, screen
from .errors import ConfigError, HandleError, IntegrityError, SampleLost
from .handle import ITEM_BYTES, Handle, TensorSpec, token_hash, token_ids_array
from .layout import Placement, encoded_row_bytes, encoding_of
from .tensors import check_dtype, empty, memory_at, view
from .tensors_cuda import used_here

TOKEN_IDS = "token_ids"

Piece = tuple[int, int, int, int]  # as in ticket.py: write, first row, last row + 1, local row


class Part:
    """What one rank's arena holds of a sample: a lease, and its head read and held to `expected`."""

    def __init__(self, lease: Lease, expected: Handle | None) -> None:
        head = lease.head
        told = head.get("handle")
        if expected is not None and told == expected.to_dict():
            self.handle = expected
        else:
            self.handle = Handle.from_json(told if isinstance(told, dict) else {})
            if expected is not None:
                raise HandleError(
                    f"sample {expected.key!r} in the arena is not what the handle describes: {_differences(expected, self.handle)}"
                )
        self.lease = lease
        self.meta: dict[str, Any] = head.get("meta", {})
        self.specs = dict(self.handle.tensors)
        if head.get(TOKEN_IDS):
            self.specs[TOKEN_IDS] = TensorSpec("int64", (self.handle.rows[1] - self.handle.rows[0],))
        self._places: Any = head.get("tensors")

    def place(self, name: str) -> Placement:
        """Raises `HandleError` where the arena's description does not agree with the sample's tensors: it could lead anywhere."""
        spec = self.specs[name]
        try:
            entry = self._places[name]
            offset, row_bytes, rows = int(entry["offset"]), int(entry["row_bytes"]), int(entry["rows"])
            digests, encoding = entry["digests"], entry.get("encoding", "none")
            marks, rows_per_mark = map(int, entry.get("marks", (0, 0)))
            digests = None if digests is None else int(digests)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise HandleError(f"the arena's description of {name!r} is malformed: {error!r}") from None
        width = math.prod(spec.shape[1:])
        if encoding == "none":
            expected = width * ITEM_BYTES[spec.dtype]
        elif encoding == encoding_of(str(encoding), spec.dtype):
            expected = encoded_row_bytes(encoding, width)
            spec = TensorSpec("uint8", (spec.shape[0], expected))
        else:
            raise HandleError(f"rows of {name!r}, {spec.dtype}, cannot be encoded as {encoding!r}")
        if row_bytes != expected:
            raise HandleError(f"rows of {name!r} have {row_bytes} bytes as {encoding}, not {expected}")
        return Placement(spec, offset, row_bytes, rows, digests, marks, rows_per_mark, encoding)

    def pieces(self, name: str) -> list[Piece]:
        """This rank's pieces of the tensor; under `leader` one that is all of it."""
        if self.handle.policy == "leader":
            return [(0, 0, self.specs[name].shape[0], 0)]
        return [
            (write, first, last, local) for write, first, last, local in self.lease.tail.get("pieces", {}).get(name, ())
        ]


class Sample:
    """Tensors by name: `sample["hidden_states"]` has shape `[rows, ...]` as its handle says, or the rows asked for.

    On the CPU a tensor is a view of shared memory, **read-only**: writing into one ends the process, and `copy=True` gives
    tensors that may be written. Leaving `with`, `release()` or the sample's death gives it back; memory is reused when no
    view lives any more.
    """

    def __init__(
        self, handle: Handle, framework: str, names: Iterable[str] | None, rows: slice | None, raw: bool = False
    ) -> None:
        self.handle = handle
        self._raw = raw
        self._framework = framework
        self.rows = _row_range(handle, rows)
        if isinstance(names, str):
            raise ConfigError(f"names={names!r}: pass a list of names")
        self._names = list(handle.tensors) if names is None else list(names)
        for name in self._names:
            if name not in handle.tensors:
                raise ConfigError(f"sample {handle.key!r} has no tensor {name!r}, but {', '.join(handle.tensors)}")
            check_dtype(framework, handle.tensors[name].dtype)
        self.meta: dict[str, Any] = {}
        self._parts: list[Part] = []
        self._tensors: dict[str, Any] = {}
        self._released = False

    def load(self, parts: Sequence[Part], verify: bool | str, copy: bool) -> None:
        """Takes the leases over; copies what is to be copied. Raises `IntegrityError`."""
        self._parts = list(parts)
        self.meta = parts[0].meta
        names = [*self._names, *([TOKEN_IDS] if TOKEN_IDS in parts[0].specs else [])]
        for name in names:
            encoding = parts[0].place(name).encoding
            if copy or len(parts) > 1 or (encoding != "none" and not self._raw):
                tensor = self._join(name, check=verify is not False)
                if encoding != "none" and not self._raw:
                    spec = parts[0].specs[name]
                    shape = (self.rows[1] - self.rows[0], *spec.shape[1:])
                    tensor = decode_torch(tensor, encoding, spec.dtype, math.prod(spec.shape[1:])).reshape(shape)
                self._tensors[name] = tensor
            elif verify is True:
                _copy(self.handle, parts[0], name, None, self.rows[0], self.rows[1], 0, check=True)
        if copy or len(parts) > 1:
            self._parts = []

    def accept(self, part: Part) -> None:
        """Raises `ConfigError` if the framework asked for cannot hold what the sample's tensors are decoded to."""
        for name in self._names:
            if part.place(name).encoding != "none" and not self._raw and self._framework != "torch":
                raise ConfigError(
                    f"{name!r} of sample {self.handle.key!r} was sent as {part.place(name).encoding}: use framework='torch' or raw=True"
                )

    def deliver(self, tensors: Mapping[str, Any], meta: dict[str, Any]) -> None:
        """Takes tensors of its own, which hold no lease."""
        self._tensors, self.meta = dict(tensors), meta
        self.used_here()

    def used_here(self) -> None:
        """Tensors on a GPU are used on the caller's current stream from now on. `get` and `prefetch` call this; who hands them
        to another stream calls `tensor.record_stream` as ever."""
        for tensor in self._tensors.values():
            used_here(tensor)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"{name!r} is none of {', '.join(self._names)}")
        return self._tensor(name)

    @property
    def token_ids(self) -> Any:
        """int64 `[rows]`, or None if the producer gave none."""
        self._check_held()
        known = TOKEN_IDS in self._tensors or (bool(self._parts) and TOKEN_IDS in self._parts[0].specs)
        return self._tensor(TOKEN_IDS) if known else None

    def keys(self) -> list[str]:
        return list(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def check(
        self,
        *,
        token_ids: Any = None,
        layers: Sequence[int] | None = None,
        convention: str | None = None,
        model: str | None = None,
        finite: bool = False,
        nonzero: bool = False,
    ) -> None:
        """Holds the sample to what the caller believes it is; raises `IntegrityError` naming the first difference.

        `token_ids`: the whole prompt, compared by hash. `finite`, `nonzero`: no row of a floating-point tensor holds NaN or
        infinity, none is all zero.
        """
        handle = self.handle
        if token_ids is not None and handle.token_hash != (expected := token_hash(token_ids_array(token_ids))):
            raise IntegrityError(f"sample {handle.key!r} is of token hash {handle.token_hash}, not {expected}")
        for what, mine, theirs in (
            ("layers", handle.layers, None if layers is None else tuple(layers)),
            ("convention", handle.convention, convention),
            ("model", handle.model, model),
        ):
            if theirs is not None and mine != theirs:
                raise IntegrityError(f"sample {handle.key!r} has {what} {mine!r}, not {theirs!r}")
        for name in self._names if finite or nonzero else ():
            if handle.tensors[name].dtype.startswith(("float", "bfloat")):
                infinite, zero = screen(self[name])
                if finite and infinite:
                    raise IntegrityError(
                        f"sample {handle.key!r}: rows {infinite[:8]} of {name!r} hold NaN or infinity ({len(infinite)} in all)"
                    )
                if nonzero and zero:
                    raise IntegrityError(
                        f"sample {handle.key!r}: rows {zero[:8]} of {name!r} are all zero ({len(zero)} in all)"
                    )

    def release(self) -> None:
        """Lets go of the memory, as soon as no tensor over it lives."""
        self._released = True
        self._parts.clear()
        self._tensors.clear()

    def __enter__(self) -> Sample:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _check_held(self) -> None:
        if self._released:
            raise SampleLost(f"sample {self.handle.key!r} was released", "released")

    def _tensor(self, name: str) -> Any:
        self._check_held()
        if name not in self._tensors:
            part = self._parts[0]
            at = part.place(name)
            start, stop = self.rows
            num_bytes = (stop - start) * at.row_bytes
            memory = memory_at(part.lease.address(at.offset + start * at.row_bytes, num_bytes), num_bytes, part.lease)
            self._tensors[name] = view(self._framework, memory, at.spec.dtype, (stop - start, *at.spec.shape[1:]))
        return self._tensors[name]

    def _join(self, name: str, check: bool) -> Any:
        """One tensor of its own from the pieces of all parts: of two that cover a row, the later write holds."""
        start, stop = self.rows
        spec = self._parts[0].place(name).spec
        tensor, address = empty(self._framework, spec.dtype, (stop - start, *spec.shape[1:]))
        pieces = sorted(
            ((piece, part) for part in self._parts for piece in part.pieces(name)), key=lambda pair: pair[0][0]
        )
        covered = 0
        row_bytes = self._parts[0].place(name).row_bytes
        for (_, first, last, local), part in pieces:
            low, high = max(first, start), min(last, stop)
            if low < high:
                _copy(self.handle, part, name, address + (low - start) * row_bytes, low, high, local - first, check)
        for low, high in sorted((first, last) for (_, first, last, _), _ in pieces):
            covered = max(covered, high) if low <= covered else covered
        if covered < stop:
            raise IntegrityError(
                f"sample {self.handle.key!r}: the parts of {len(self._parts)} ranks leave rows of {name!r} from {covered} on open"
            )
        return tensor


def _copy(
    handle: Handle, part: Part, name: str, target: int | None, start: int, stop: int, shift: int, check: bool
) -> None:
    """Rows `[start, stop)`, which lie at local rows `start + shift`; with `target` None only their digests are checked."""
    at = part.place(name)
    source = part.lease.address(at.offset + (start + shift) * at.row_bytes, (stop - start) * at.row_bytes)
    library = _native.load()
    if not check or at.digests is None:
        if target is not None:
            library.check(
                library.slow.hsx_copy_rows(
                    target, at.row_bytes, source, at.row_bytes, at.row_bytes, stop - start, None, 8
                )
            )
        return
    expected = part.lease.address(at.digests + 8 * (start + shift), 8 * (stop - start))
    bad = _native.c_uint64()
    code = library.slow.hsx_verify_rows(
        target, at.row_bytes, source, at.row_bytes, at.row_bytes, stop - start, expected, 8, byref(bad)
    )
    if code == _native.INTEGRITY:
        raise IntegrityError(f"sample {handle.key!r}: row {start + bad.value} of {name!r} differs from what was sent")
    library.check(code)


def _row_range(handle: Handle, rows: slice | None) -> tuple[int, int]:
    first, last = handle.rows
    if rows is None:
        return 0, last - first
    if not isinstance(rows, slice) or rows.step not in (None, 1):
        raise ConfigError(f"rows={rows!r}: pass slice(start, stop) without a step")
    start = first if rows.start is None else rows.start
    stop = last if rows.stop is None else rows.stop
    if not (isinstance(start, int) and isinstance(stop, int) and first <= start <= stop <= last):
        raise ConfigError(f"rows {rows.start}:{rows.stop} are outside of the sample's [{first}, {last})")
    return start - first, stop - first


def _differences(expected: Handle, found: Handle) -> str:
    mine, theirs = expected.to_dict(), found.to_dict()
    return ", ".join(f"{key} {theirs[key]!r}, not {mine[key]!r}" for key in mine if mine[key] != theirs[key])[:300]

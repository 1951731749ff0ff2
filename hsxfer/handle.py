"""A Handle says which sample, never where: JSON that any rank can derive (docs/format.md, 6). Standard library only."""

from __future__ import annotations

import array
import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import HandleError

FORMAT_VERSION = 0
MAX_JSON_BYTES = 1 << 16
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_ROWS = 1 << 40
MAX_TENSOR_BYTES = 1 << 48

# Every dtype torch can hold as plain bytes, under torch's name.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}

_TENSOR = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INSTANCE = re.compile(r"[A-Za-z0-9_-]{1,32}")
_STORE = re.compile(r"[a-z][a-z0-9-]{0,31}://[A-Za-z0-9_.-]{1,64}")
_LABEL = re.compile(r"dp[0-9]{1,6}-pp[0-9]{1,6}-tp[0-9]{1,6}")
_HASH = re.compile(r"[0-9a-f]{16}")
_KEYS = {
    *("hsxfer", "store", "instance", "key", "rid", "rows", "tensors", "layers"),
    *("convention", "policy", "ranks", "consumers", "token_hash", "model"),
}


@dataclass(frozen=True)
class TensorSpec:
    """`dtype` under torch's name, without `torch.`; `shape[0]` is rows."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Handle:
    """Names one sample of one store. Immutable; equal on every rank that derives it."""

    store: str
    instance: str
    key: str
    rows: tuple[int, int]
    tensors: Mapping[str, TensorSpec]
    ranks: tuple[str, ...]
    policy: str = "leader"
    rid: str | None = None
    consumers: int = 1
    layers: tuple[int, ...] | None = None
    convention: str | None = None
    token_hash: str | None = None
    model: str | None = None
    version: int = field(default=FORMAT_VERSION, repr=False)

    def __hash__(self) -> int:
        return hash((self.store, self.instance, self.key))

    def check_names(self) -> None:
        """Of a handle made by hand too: what finds an arena must not lead out of the store. Raises `HandleError`."""
        check_key(self.key)
        _text(self.instance, "instance", _INSTANCE)
        for label in self.ranks:
            _text(label, "rank", _LABEL)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only; what `from_json` accepts."""
        return {
            "hsxfer": self.version,
            "store": self.store,
            "instance": self.instance,
            "key": self.key,
            "rid": self.rid,
            "rows": list(self.rows),
            "tensors": {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in self.tensors.items()},
            "layers": None if self.layers is None else list(self.layers),
            "convention": self.convention,
            "policy": self.policy,
            "ranks": list(self.ranks),
            "consumers": self.consumers,
            "token_hash": self.token_hash,
            "model": self.model,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, source: str | bytes | bytearray | Mapping[str, Any]) -> Handle:
        """Checks everything and trusts nothing. Raises `HandleError` naming the value that is wrong."""
        if not isinstance(source, Mapping):
            source = _parse(source)
        if source.keys() != _KEYS:
            unknown = sorted(str(key)[:40] for key in source if key not in _KEYS)
            raise HandleError(
                f"unknown entries {unknown[:5]}" if unknown else f"entries {sorted(_KEYS - set(source))} are missing"
            )
        version = source["hsxfer"]
        _require(
            _is_int(version) and version == FORMAT_VERSION, "format version {}, this reads {}", version, FORMAT_VERSION
        )
        rows = _rows(source["rows"])
        return cls(
            version=version,
            store=_text(source["store"], "store", _STORE),
            instance=_text(source["instance"], "instance", _INSTANCE),
            key=check_key(source["key"]),
            rid=_optional_text(source["rid"], "rid"),
            rows=rows,
            tensors=_tensors(source["tensors"], rows[1] - rows[0]),
            layers=_layers(source["layers"]),
            convention=_optional_text(source["convention"], "convention"),
            policy=_choice(source["policy"], "policy", ("leader", "shard")),
            ranks=_ranks(source["ranks"]),
            consumers=_bounded(source["consumers"], "consumers", 1, 65535),
            token_hash=None if source["token_hash"] is None else _text(source["token_hash"], "token_hash", _HASH),
            model=_optional_text(source["model"], "model"),
        )

    @classmethod
    def from_meta_info(cls, meta_info: Any) -> Handle:
        """From `meta_info` of an sglang reply, or the whole reply. Raises `HandleError`, saying why no handle is in it."""
        if isinstance(meta_info, Mapping) and isinstance(meta_info.get("meta_info"), Mapping):
            meta_info = meta_info["meta_info"]
        if not isinstance(meta_info, Mapping):
            raise HandleError(f"meta_info is a dict, not {type(meta_info).__name__}")
        found = meta_info.get("hidden_states")
        if found is None or found == []:
            raise HandleError(
                "the reply holds no hidden states: the request did not ask for them (return_hidden_states=True), or this "
                "endpoint drops them"
            )
        first = found[0] if isinstance(found, list) else found
        if isinstance(first, Mapping) and set(first) == {"error"}:
            raise HandleError(f"the server gave no handle: {_short(first['error'])}")
        if isinstance(first, str | Mapping):
            return cls.from_json(first)
        if isinstance(first, list | float):
            raise HandleError(
                "the reply holds lists of floats, not a handle: the hsxfer plugin was not active in the server. Set HSXFER_SINK in its "
                "environment, install hsxfer in its Python, and let SGLANG_PLUGINS, if set, name it"
            )
        raise HandleError(f"meta_info['hidden_states'] holds {type(first).__name__}, not a handle")


def check_key(key: Any) -> str:
    """1 to 256 bytes of UTF-8 without control characters."""
    _require(isinstance(key, str), "key {} is not a string", key)
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise HandleError(f"key {_short(key)} is not valid UTF-8") from None
    _require(1 <= size <= 256 and key.isprintable(), "key {} is not 1 to 256 printable bytes", key)
    return str(key)


def check_rid(rid: Any) -> str | None:
    return _optional_text(rid, "rid")


def check_consumers(consumers: Any) -> int:
    return _bounded(consumers, "consumers", 1, 65535)


def check_tensors(tensors: Mapping[str, tuple[Iterable[int], str]]) -> dict[str, TensorSpec]:
    """`{name: (shape, dtype)}` -> specs; all of them with the same number of rows."""
    _require(1 <= len(tensors) <= MAX_TENSORS, "tensors {} is not a table of 1 to {}", list(tensors), MAX_TENSORS)
    specs: dict[str, TensorSpec] = {}
    for name, (extents, dtype) in tensors.items():
        shape = tuple(extents)
        _require(bool(shape), "a tensor needs at least one dimension, its rows")
        rows = next(iter(specs.values())).shape[0] if specs else shape[0]
        specs[name] = _spec(name, str(dtype).removeprefix("torch."), shape, rows)
    return specs


def token_ids_array(token_ids: Any) -> array.array[int]:
    """Any iterable of ints, or a buffer of int64, as a little-endian int64 array."""
    if isinstance(token_ids, array.array) and token_ids.typecode == "q":
        return token_ids
    if hasattr(token_ids, "tolist"):  # numpy, torch
        token_ids = token_ids.tolist()
    try:
        return array.array("q", token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise HandleError(f"token_ids must be a flat sequence of int64: {error}") from None


def token_hash(token_ids: array.array[int]) -> str:
    assert sys.byteorder == "little"
    return hashlib.blake2b(token_ids.tobytes(), digest_size=8).hexdigest()


def _parse(source: str | bytes | bytearray) -> Mapping[str, Any]:
    if not isinstance(source, str | bytes | bytearray):
        raise HandleError(f"a handle is JSON or a dict, not {type(source).__name__}")
    _require(len(source) <= MAX_JSON_BYTES, "{} bytes of JSON, at most {}", len(source), MAX_JSON_BYTES)
    try:
        parsed = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise HandleError(f"not a handle: {error} in {_short(source)}") from None
    _require(isinstance(parsed, dict), "not a handle: {}", source)
    return parsed  # type: ignore[no-any-return]


def _require(condition: bool, message: str, *values: Any) -> None:
    """`message` is formatted only when it is needed: printing every good value made up half of `from_json`."""
    if not condition:
        raise HandleError(message.format(*map(_short, values)) if values else message)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints; a list too deep
        text = f"of type {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounded(value: Any, what: str, low: int, high: int) -> int:
    _require(_is_int(value) and low <= value <= high, what + " {} is not an integer in {}..{}", value, low, high)
    return int(value)


def _text(value: Any, what: str, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise HandleError(f"{what} {_short(value)} is not {pattern.pattern}")
    return value


def _optional_text(value: Any, what: str) -> str | None:
    _require(
        value is None or (isinstance(value, str) and len(value) <= 1024),
        what + " {} is not a short string or null",
        value,
    )
    return value  # type: ignore[no-any-return]


def _choice(value: Any, what: str, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise HandleError(f"{what} {_short(value)} is not one of {', '.join(allowed)}")
    return value


def _list(value: Any, what: str, most: int) -> list[Any]:
    _require(
        isinstance(value, list | tuple) and len(value) <= most,
        what + " {} is not a list of at most {}",
        value,
        most,
    )
    return list(value)


def _rows(value: Any) -> tuple[int, int]:
    bounds = _list(value, "rows", 2)
    _require(len(bounds) == 2, "rows {} is not [start, stop]", value)
    start, stop = (_bounded(bound, "rows", 0, MAX_ROWS) for bound in bounds)
    _require(start <= stop, "rows {}: start after stop", value)
    return start, stop


def _tensors(value: Any, rows: int) -> dict[str, TensorSpec]:
    _require(
        isinstance(value, Mapping) and 1 <= len(value) <= MAX_TENSORS,
        "tensors {} is not a table of 1 to {}",
        value,
        MAX_TENSORS,
    )
    specs = {}
    for name, entry in value.items():
        _text(name, "tensor name", _TENSOR)
        _require(
            isinstance(entry, Mapping) and entry.keys() == {"dtype", "shape"},
            "tensor {}: {} is not dtype and shape",
            name,
            entry,
        )
        shape = _list(entry["shape"], f"tensor {name!r}: shape", MAX_DIMENSIONS)
        specs[name] = _spec(name, entry["dtype"], tuple(shape), rows)
    return specs


def _spec(name: Any, dtype: Any, shape: tuple[Any, ...], rows: int) -> TensorSpec:
    _text(name, "tensor name", _TENSOR)
    _require(name != "token_ids", "the tensor name token_ids is taken: pass token_ids=")
    what = f"tensor {name!r}"
    num_bytes = ITEM_BYTES[_choice(dtype, what + ": dtype", ITEM_BYTES)]
    for extent in shape:
        num_bytes *= _bounded(extent, what + ": extent", 0, MAX_ROWS) or 1  # an extent of 0 hides nothing
    _require(len(shape) <= MAX_DIMENSIONS, what + ": shape {} has more than {} dimensions", shape, MAX_DIMENSIONS)
    _require(
        bool(shape) and shape[0] == rows, what + ": shape {} does not begin with the sample's {} rows", shape, rows
    )
    _require(num_bytes <= MAX_TENSOR_BYTES, what + ": {} of {} is more than {} bytes", shape, dtype, MAX_TENSOR_BYTES)
    return TensorSpec(dtype, shape)


def _layers(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(_bounded(layer, "layer", -1, 1 << 20) for layer in _list(value, "layers", 1024))


def _ranks(value: Any) -> tuple[str, ...]:
    labels = tuple(_text(label, "rank", _LABEL) for label in _list(value, "ranks", 4096))
    _require(bool(labels) and len(set(labels)) == len(labels), "ranks {} is empty or repeats itself", value)
    return labels

"""What a producer says of its samples: the part of a handle that all share, and one sample's handle."""

from __future__ import annotations

import array
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import ConfigError, HandleError
from .handle import (
    Handle,
    TensorSpec,
    check_consumers,
    check_key,
    check_rid,
    check_tensors,
    token_hash,
    token_ids_array,
)

Shapes = Mapping[str, tuple[Iterable[int], str]]


def check_identity(
    store: str,
    instance: str,
    policy: str,
    ranks: tuple[str, ...],
    model: str | None,
    layers: Sequence[int] | None,
    convention: str | None,
) -> dict[str, Any]:
    """The entries that every handle of a sink has. Raises `ConfigError`."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", instance):
        raise ConfigError(f"instance {instance!r} is not 1 to 32 characters A-Z a-z 0-9 _ -")
    identity: dict[str, Any] = {
        "store": store,
        "instance": instance,
        "policy": policy,
        "ranks": ranks,
        "model": model,
        "layers": None if layers is None else tuple(layers),
        "convention": convention,
    }
    try:
        Handle.from_json(Handle(key="k", rows=(0, 0), tensors={"x": TensorSpec("int8", (0,))}, **identity).to_dict())
    except HandleError as error:
        raise ConfigError(str(error)) from None
    return identity


def describe(
    identity: Mapping[str, Any], key: str, tensors: Shapes, token_ids: Any, rid: str | None, consumers: int
) -> tuple[Handle, array.array[int] | None]:
    """A sample's handle, and its token ids as int64. Raises `HandleError`, `ConfigError`."""
    specs = check_tensors(tensors)
    rows = next(iter(specs.values())).shape[0]
    ids = None if token_ids is None else token_ids_array(token_ids)
    if ids is not None and len(ids) != rows:
        raise ConfigError(f"{len(ids)} token_ids for {rows} rows")
    handle = Handle(
        key=check_key(key),
        rid=check_rid(rid),
        rows=(0, rows),
        tensors=specs,
        consumers=check_consumers(consumers),
        token_hash=None if ids is None else token_hash(ids),
        **identity,
    )
    return handle, ids

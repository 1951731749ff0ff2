"""Store URLs: `scheme://NAME?option=value&...`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from .errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_MAX_BYTES = 1 << 48  # what an arena can have, and a 64-bit sum of a few can hold


def parse_size(text: str) -> int:
    """`"8GiB"`, `"512MiB"`, `"1.5GB"`, `"4096"` -> bytes. `i` means powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is not a size; write 512MiB, 8GiB or a number of bytes")
    number, prefix, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    if not 0 < size <= _MAX_BYTES:
        raise ConfigError(f"a size is 1 byte to 256 TiB, not {text!r}")
    return size


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ConfigError(f"{text!r} is not a number of seconds from 0 on")
    return value


def _slots(text: str) -> int:
    if not re.fullmatch("[0-9]{1,7}", text) or int(text) > 1 << 22:
        raise ConfigError(f"{text!r} is not a number of slots up to {1 << 22}")
    return int(text)


def _device(text: str) -> str:
    if not re.fullmatch("auto|cpu|cuda:[0-9]{1,3}", text):
        raise ConfigError(f"{text!r} is not auto, cpu or cuda:N")
    return text


def _directory(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ConfigError(f"{text!r} is not an absolute path")
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "off", "on", "false", "true"):
        raise ConfigError(f"{text!r} is neither on nor off")
    return text.lower() in ("1", "on", "true")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ConfigError(f"{text!r} is not one of {', '.join(allowed)}{near_miss(text, allowed)}")
        return text

    return parse


@dataclass(frozen=True)
class Options:
    """What a store URL can say. A source ignores the options that are the sink's."""

    capacity_bytes: int = 1 << 30
    on_full: str = "block"
    block_s: float = 30.0
    unread_ttl_s: float = 600.0
    digest: bool = True
    num_slots: int = 0
    dir: str = "/dev/shm"
    device: str = "auto"
    encode: str = "none"


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "capacity": ("capacity_bytes", parse_size),
    "on_full": ("on_full", _choice("block", "error", "drop")),
    "block_s": ("block_s", _seconds),
    "unread_ttl_s": ("unread_ttl_s", _seconds),
    "digest": ("digest", _flag),
    "slots": ("num_slots", _slots),
    "dir": ("dir", _directory),
    "device": ("device", _device),
    "encode": ("encode", _choice("none", "fp8", "bf16")),
}
assert {name for name, _ in _PARSERS.values()} == {field.name for field in fields(Options)}


@dataclass(frozen=True)
class StoreUrl:
    """A parsed URL. `str()` gives `scheme://NAME`, the store's identity in a handle."""

    scheme: str
    name: str
    options: Options

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"


def check_seconds(what: str, value: Any) -> float:
    """A number of seconds, also infinite or negative, but not NaN. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ConfigError(f"{what}={value!r} is not a number of seconds")
    return float(value)


def near_miss(word: str, known: Any) -> str:
    """`"; did you mean X?"` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_url(url: str, schemes: tuple[str, ...]) -> StoreUrl:
    """Raises `ConfigError` naming what is wrong: scheme, name, an unknown or repeated option, a value."""
    if not isinstance(url, str):
        raise ConfigError(f"a store URL is a string such as shm://NAME, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a store URL: {error}") from None
    if parts.scheme not in schemes:
        known = ", ".join(schemes)
        raise ConfigError(f"{url!r}: scheme {parts.scheme!r} is not one of {known}{near_miss(parts.scheme, schemes)}")
    name = parts.netloc
    if not _NAME.fullmatch(name) or name in (".", "..") or parts.path not in ("", "/") or parts.fragment:
        raise ConfigError(f"{url!r}: a store is {parts.scheme}://NAME, NAME of 1 to 64 characters A-Z a-z 0-9 _ . -")
    values: dict[str, Any] = {}
    for option, text in query:
        if option not in _PARSERS:
            raise ConfigError(f"{url!r}: unknown option {option!r}{near_miss(option, _PARSERS)}")
        field, parse = _PARSERS[option]
        if field in values:
            raise ConfigError(f"{url!r}: option {option!r} is given twice")
        try:
            values[field] = parse(text)
        except ValueError as error:
            raise ConfigError(f"{url!r}: option {option!r}: {error}") from None
    return StoreUrl(parts.scheme, name, Options(**values))

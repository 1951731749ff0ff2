"""The border between hsxfer and the engine: what may cross it, and what ends the server instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

logger = logging.getLogger("hsxfer.sglang")

P = ParamSpec("P")
T = TypeVar("T")

_seen: set[str] = set()


def attempt(otherwise: Callable[[Exception], T], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The function's result, or `otherwise(error)` if it raises: the only place where hsxfer catches what it does not know."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the engine always wins
        return otherwise(error)


def survive(
    what: str, otherwise: Callable[[Exception], T], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """`attempt` for hooks of a running server, which an exception would kill.

    The first error of each `what` is logged with its traceback, later ones at debug level.
    """

    def log(error: Exception) -> T:
        level = logging.DEBUG if what in _seen else logging.ERROR
        _seen.add(what)
        logger.log(level, "hsxfer could not %s; the engine goes on: %s", what, error, exc_info=error)
        return otherwise(error)

    return attempt(log, function, *args, **kwargs)


def nothing(error: Exception) -> None:
    """For `survive`: the log is enough."""


def refuse(sentence: str) -> NoReturn:
    """End this process with `sentence` on stderr. Only while the server starts."""
    raise SystemExit(f"hsxfer: {sentence}")

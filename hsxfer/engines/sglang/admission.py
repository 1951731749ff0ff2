"""Space before work: where requests wait for room in the store, and others pass them.

Runs on the one rank that receives, before what it received is broadcast, because a request held back on one rank only would put the
ranks out of step. The scheduler is never blocked: a request that finds no room is kept here, first come first served, until there is
room or `block_s` has passed; then it goes on without a ticket and its reader is told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hsxfer import StoreFull

from .guard import survive
from .plugin import Plugin, Wanted

RETRY_EVERY_S = 0.002  # a try costs some ten microseconds, a loop of a decoding server may be as short as a millisecond


class Messages(Protocol):
    """What the engine's messages say; one implementation for each version."""

    def split(self, message: Any) -> list[Any]:
        """The requests of a batch message that has any request that wants hidden states; else the message alone."""

    def wanted(self, message: Any) -> Wanted | None:
        """The message as a request that wants hidden states, or None."""

    def aborts(self, message: Any) -> Callable[[str], bool] | None:
        """For a message that aborts requests: whether it means a request id. Else None."""

    def mark(self, message: Any, number: int) -> None:
        """Put `number` on the message so that every rank reads it and no rank finds a cached prefix for it."""


@dataclass
class Held:
    """A request that waits for room until `deadline`."""

    message: Any
    wanted: Wanted
    number: int
    deadline: float


class Admission:
    """`receive` maps what a scheduler loop received to what the ranks shall see of it."""

    def __init__(self, plugin: Plugin, messages: Messages, block_s: float) -> None:
        self._plugin = plugin
        self._messages = messages
        self._block_s = block_s
        self._held: deque[Held] = deque()
        self._next_try = 0.0
        self._number = 0

    @property
    def waiting(self) -> bool:
        """Whether requests wait for room."""
        return bool(self._held)

    def receive(self, received: list[Any]) -> list[Any]:
        """Messages in, messages out, in order except that held requests are passed. Never raises, never loses one."""
        passed: list[Any] = []
        if self._held:
            self._retry(passed)
        for message in received:
            for part in survive("read a message", _whole, self._messages.split, message) or [message]:
                if survive("admit a request", _pass_on, self._admit, part, passed):
                    passed.append(part)
        return passed

    def _admit(self, message: Any, passed: list[Any]) -> bool:
        """Whether the message may go on now; if not, it was put in the queue."""
        aborts = self._messages.aborts(message)
        if aborts is not None:
            self._release_aborted(aborts, passed)
            return True
        wanted = self._messages.wanted(message)
        if wanted is None:
            return True
        self._number += 1
        self._plugin.counters.num_requests += 1
        self._messages.mark(message, self._number)
        held = Held(message, wanted, self._number, time.monotonic() + self._block_s)
        at_once = not self._held or wanted.refusal or self._plugin.never_fits(wanted)
        if at_once and self._settle(held):
            return True
        self._plugin.counters.num_held += 1
        self._held.append(held)
        return False

    def _settle(self, held: Held) -> bool:
        """Reserve, or reject what cannot wait. False: it has to wait."""
        reason = held.wanted.refusal
        if not reason:
            try:
                self._plugin.reserve(held.wanted, held.number)
            except StoreFull as full:
                never = full.needed_bytes > full.capacity_bytes
                if not never and time.monotonic() < held.deadline:
                    return False
                waited = "" if never or not self._block_s else f" after {self._block_s:g} s"
                reason = f"StoreFull{waited}: {full}"
        if reason:
            self._plugin.reject(held.wanted, held.number, reason)
        return True

    def _retry(self, passed: list[Any]) -> None:
        now = time.monotonic()
        if now < self._next_try:
            return
        self._next_try = now + RETRY_EVERY_S
        while self._held:
            if not survive("admit a held request", _pass_on, self._settle, self._held[0]):
                return
            passed.append(self._held.popleft().message)

    def _release_aborted(self, aborts: Callable[[str], bool], passed: list[Any]) -> None:
        """Let the engine see an aborted request just before its abort: it answers the client, on every rank alike."""
        for held in [held for held in self._held if aborts(held.wanted.rid)]:
            self._held.remove(held)
            passed.append(held.message)
            self._plugin.reject(held.wanted, held.number, "the request was aborted while it waited for room")


def _pass_on(error: Exception) -> bool:
    """Without a sample, which its reader will be told."""
    return True


def _whole(error: Exception) -> list[Any]:
    """No parts that could be told apart."""
    return []

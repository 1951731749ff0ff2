"""Who waits for room, who passes, who fails: without an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hsxfer import StoreFull
from hsxfer.engines.sglang import admission
from hsxfer.engines.sglang.admission import Admission
from hsxfer.engines.sglang.plugin import Plugin, Wanted


@dataclass(eq=False)
class Message:
    rid: str
    rows: int = 0
    parts: tuple[Message, ...] = ()
    abort: bool = False
    number: int = 0
    refusal: str = ""


class Messages:
    def split(self, message: Message) -> list[Message]:
        return list(message.parts) or [message]

    def wanted(self, message: Message) -> Wanted | None:
        if message.rows < 0:
            raise ValueError("a message nobody understands")
        return Wanted(message.rid, message.rows, None, message.refusal) if message.rows else None

    def aborts(self, message: Message) -> Any:
        return (lambda rid: rid.startswith(message.rid)) if message.abort else None

    def mark(self, message: Message, number: int) -> None:
        message.number = number


class Ticket:
    def __init__(self, sink: Sink, rows: int) -> None:
        self.sink, self.rows = sink, rows
        self.handle = SimpleNamespace(to_dict=dict)
        self.ended = ""

    def commit(self) -> None:
        self.ended = "committed"

    def abort(self, reason: str) -> None:
        self.ended = reason
        self.sink.used -= self.rows


class Sink:
    """Room for ten rows of one byte."""

    sends = True
    options = SimpleNamespace(capacity_bytes=10)

    def __init__(self) -> None:
        self.used = 0
        self.rejected: dict[str, str] = {}

    def begin(self, key: str, tensors: Any, block_s: float, **_: Any) -> Ticket:
        assert block_s == 0
        rows = tensors["hidden_states"][0][0]
        if self.used + rows > 10:
            raise StoreFull("no room", rows, 10 - self.used, 10)
        self.used += rows
        return Ticket(self, rows)

    def reject(self, key: str, tensors: Any, reason: str, **_: Any) -> Any:
        self.rejected[key] = reason
        return SimpleNamespace(to_dict=dict)

    def stats(self) -> dict[str, int]:
        return {}


class Setting:
    def __init__(self, block_s: float = 60.0) -> None:
        self.sink = Sink()
        self.plugin = Plugin(self.sink, "dp0-pp0-tp0", 1, "int8", 1)
        self.admission = Admission(self.plugin, Messages(), block_s)

    def receive(self, *messages: Message) -> list[str]:
        return [message.rid for message in self.admission.receive(list(messages))]


@pytest.fixture(autouse=True)
def try_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RETRY_EVERY_S", 0.0)


def test_those_who_find_room_go_on_in_order_and_numbered() -> None:
    setting = Setting()
    messages = [Message("a", 3), Message("plain"), Message("b", 4)]
    assert setting.receive(*messages) == ["a", "plain", "b"]
    assert [message.number for message in messages] == [1, 0, 2]
    assert setting.plugin.claim(2, "b") is not None
    assert setting.plugin.claim(2, "b") is None
    assert setting.plugin.claim(1, "somebody else") is None


def test_the_first_who_waits_is_the_first_who_goes_and_the_rest_pass() -> None:
    setting = Setting()
    assert setting.receive(Message("a", 8), Message("b", 9), Message("c", 1), Message("plain")) == ["a", "plain"]
    assert setting.admission.waiting
    assert setting.receive(Message("plain2")) == ["plain2"]
    setting.sink.used = 0
    assert setting.receive() == ["b", "c"]
    assert not setting.admission.waiting
    assert setting.plugin.counters.num_held == 2
    assert not setting.sink.rejected


def test_who_waited_long_enough_goes_on_without_room() -> None:
    setting = Setting(block_s=0.05)
    assert setting.receive(Message("a", 10), Message("b", 1)) == ["a"]
    assert setting.receive() == []
    time.sleep(0.06)
    assert setting.receive() == ["b"]
    assert setting.sink.rejected == {"b-2": "StoreFull after 0.05 s: no room"}
    assert setting.plugin.claim(2, "b") is not None


def test_without_patience_nobody_waits() -> None:
    setting = Setting(block_s=0.0)
    assert setting.receive(Message("a", 10), Message("b", 1)) == ["a", "b"]
    assert setting.sink.rejected == {"b-2": "StoreFull: no room"}


@pytest.mark.parametrize("hopeless", [Message("x", 11), Message("x", 1, refusal="never")])
def test_what_waiting_cannot_help_fails_at_once_and_passes_those_who_wait(hopeless: Message) -> None:
    setting = Setting()
    setting.receive(Message("a", 10), Message("b", 1))
    assert setting.receive(hopeless) == ["x"]
    assert list(setting.sink.rejected) == ["x-3"]


def test_a_batch_is_taken_apart_only_where_it_must() -> None:
    setting = Setting()
    batch = Message("batch", parts=(Message("a", 6), Message("b", 6), Message("plain")))
    assert setting.receive(batch) == ["a", "plain"]
    setting.sink.used = 0
    assert setting.receive() == ["b"]


def test_an_abort_lets_those_it_means_go_first() -> None:
    setting = Setting()
    setting.receive(Message("a", 10), Message("job-1", 1), Message("other", 1), Message("job-2", 1))
    assert setting.receive(Message("job", abort=True)) == ["job-1", "job-2", "job"]
    assert set(setting.sink.rejected) == {"job-1-2", "job-2-4"}
    assert setting.admission.waiting


def test_a_message_that_breaks_the_hook_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    setting = Setting()
    assert setting.receive(Message("odd", -1), Message("a", 1)) == ["odd", "a"]
    assert setting.receive(Message("odd", -1)) == ["odd"]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_a_dropped_request_gives_its_room_back() -> None:
    setting = Setting()
    setting.receive(Message("a", 10))
    sample = setting.plugin.claim(1, "a")
    assert sample is not None
    ticket = sample.ticket
    del sample
    assert ticket.ended == ""
    setting.plugin.poll()
    assert "ended before its prompt" in ticket.ended
    assert setting.sink.used == 0

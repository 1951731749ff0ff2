"""Keys, typed replies, counters, and rows that do not fit: without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sglang_admission import Message, Setting

from hsxfer.engines.sglang import register
from hsxfer.engines.sglang.counters import StatsFile
from hsxfer.engines.sglang.guard import refuse
from hsxfer.engines.sglang.plugin import Piece
from hsxfer.engines.sglang.replies import decode, encode
from hsxfer.engines.sglang.samples import Sample, make_key
from hsxfer.engines.sglang.v0_5_23 import scheduler
from hsxfer.handle import check_key


@pytest.mark.parametrize(
    "rid", ["", "req-17", "a b", "../x", "x" * 5000, "ü" * 150, "a\nb", "\ud800", "\x00", "\u200b"]
)
def test_every_request_id_makes_a_key(rid: str) -> None:
    key = make_key(rid, 7)
    assert check_key(key) == key
    assert key.endswith("-7")
    assert make_key(rid, 8) != key


def test_ordinary_request_ids_stay_readable() -> None:
    assert make_key("req-17", 3) == "req-17-3"


def test_a_handle_survives_typed_messages() -> None:
    handle = {"key": "ü-1", "rows": [0, 3], "rid": None}
    encoded = encode(handle)
    assert encoded[0] is None
    assert decode([[None, *map(float, encoded[1:])]]) == [handle]


@pytest.mark.parametrize("states", [None, [], [[0.5, 1.0]], [[[0.5], [1.0]]], [[0.5], [1.0]], [[]], [[None]]])
def test_what_is_no_handle_stays_as_it_is(states: Any) -> None:
    assert decode(states) == states


def test_counters_are_written_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsxfer.engines.sglang.counters.WRITE_EVERY_S", 0.0)
    stats = {"a": 1}
    path = tmp_path / "stats.json"
    file = StatsFile(str(path), lambda: stats)
    file.poll()
    assert json.loads(path.read_text()) == stats
    path.unlink()
    file.poll()
    assert not path.exists()
    stats["a"] = 2
    file.poll()
    assert json.loads(path.read_text()) == stats


def test_a_refusal_is_one_sentence() -> None:
    with pytest.raises(SystemExit, match=r"^hsxfer: no$"):
        refuse("no")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HSXFER_SINK": "shm://no spaces"}, "NAME"),
        ({"HSXFER_SINK": "tcp://x"}, "scheme"),
        ({"HSXFER_SINK": "shm://x", "HSXFER_LAYERS": "2,14"}, "HSXFER_LAYERS"),
    ],
)
def test_what_cannot_be_configured_is_refused(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=expected):
        register()


class Recorder(Setting):
    """A setting with one open sample of four rows, and what was written to it."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.receive(Message("a", 4))
        sample = self.plugin.claim(1, "a")
        assert sample is not None
        self.sample: Sample = sample
        self.ticket = sample.ticket
        self.writes: list[Any] = []

        def write_many(writes: list[Any]) -> None:
            if fails:
                raise OSError("no such luck")
            self.writes += [(start, rows.tolist()) for _, _, start, rows in writes]

        self.sink.write_many = write_many  # type: ignore[attr-defined]

    def take(self, hidden: Any, offset: int, start: int, rows: int, num_rows: int) -> None:
        self.plugin.take([Piece(self.sample, offset, start, rows)], hidden, num_rows, snapshot=False)


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int8)[:, None]


def test_rows_go_to_their_positions_and_generated_ones_nowhere() -> None:
    recorder = Recorder()
    recorder.take(column(9, 0, 1, 9), 1, 0, 2, 4)
    recorder.take(column(2, 3, 4, 5), 0, 2, 4, 4)
    recorder.take(column(6), 0, 6, 1, 1)
    assert recorder.writes == [(0, [[0], [1]]), (2, [[2], [3]])]
    recorder.plugin.commit(recorder.sample)
    assert recorder.ticket.ended == "committed"
    recorder.take(column(0, 0, 0, 0), 0, 0, 4, 4)
    assert len(recorder.writes) == 2
    assert recorder.plugin.counters.num_rows == recorder.plugin.counters.num_bytes == 4


@pytest.mark.parametrize(
    ("hidden", "reason"), [(None, "no hidden states"), (column(1, 2), "shape"), (torch.zeros(4, 2), "shape")]
)
def test_states_that_do_not_fit_fail_the_sample(hidden: Any, reason: str) -> None:
    recorder = Recorder()
    recorder.take(hidden, 0, 0, 4, 4)
    assert reason in recorder.ticket.ended
    assert not recorder.writes


def test_a_sink_that_fails_fails_the_sample_and_not_the_engine() -> None:
    recorder = Recorder(fails=True)
    recorder.take(column(0, 1, 2, 3), 0, 0, 4, 4)
    assert recorder.ticket.ended == "OSError: no such luck"
    recorder.plugin.commit(recorder.sample)
    assert recorder.plugin.counters.num_failed == 1
    assert recorder.plugin.counters.num_committed == 0


def test_what_the_engine_overwrites_is_copied_first() -> None:
    recorder = Recorder()
    hidden = column(0, 1, 2, 3)
    kept: list[torch.Tensor] = []
    recorder.sink.write_many = lambda writes: kept.extend(rows for *_, rows in writes)  # type: ignore[attr-defined]
    recorder.plugin.take([Piece(recorder.sample, 0, 0, 4)], hidden, 4, snapshot=True)
    hidden.zero_()
    assert kept[0].tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("result", "missing"),
    [
        (SimpleNamespace(), "logits_output"),
        (SimpleNamespace(logits_output=SimpleNamespace(hidden_states=column(0, 1, 2, 3))), "can_run_cuda_graph"),
    ],
)
def test_a_result_that_is_not_as_known_fails_the_sample_and_not_the_engine(
    result: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(scheduler, "_plugin", recorder.plugin)
    request = SimpleNamespace(hsxfer=recorder.sample, to_finish=None, origin_input_ids=[1, 2, 3, 4])
    batch = SimpleNamespace(
        **{"return_hidden_states": True, "forward_mode": SimpleNamespace(is_extend=lambda: True)},
        **{"reqs": [request], "prefix_lens": [0], "extend_lens": [4]},
    )
    assert scheduler.on_forward(lambda worker, batch: result, None, batch) is result
    assert missing in recorder.ticket.ended
    assert not recorder.writes

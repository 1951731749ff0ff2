"""Who sends which rows, and where a part keeps them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer import pattern

import hsxfer
from hsxfer import ConfigError, Rank
from hsxfer.ranks import cut, part_rows, senders
from hsxfer.ticket import Ranges

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=30)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 9))
def test_a_cut_covers_every_row_once_and_evenly(start: int, rows: int, count: int) -> None:
    pieces = [cut(start, start + rows, index, count) for index in range(count)]
    assert [row for first, last in pieces for row in range(first, last)] == list(range(start, start + rows))
    assert max(last - first for first, last in pieces) - min(last - first for first, last in pieces) <= 1


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9))
def test_a_part_has_room_for_its_share_of_chunks(rows: int, chunks: int, count: int) -> None:
    bounds = [rows * chunk // chunks for chunk in range(chunks + 1)]
    for index in range(count):
        pieces = [cut(start, stop, index, count) for start, stop in itertools.pairwise(bounds)]
        assert sum(last - first for first, last in pieces) <= part_rows(rows, count) <= rows


@pytest.mark.parametrize("policy", ["leader", "shard"])
@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 1, 1), (4, 1, 1), (2, 3, 1), (1, 1, 4), (2, 2, 3)])
def test_senders(policy: str, tp: int, dp: int, pp: int) -> None:
    """The same list on every rank of a group; last pipeline stage only; no rank in two groups."""
    groups = {
        d: {senders(Rank((t, tp), (d, dp), (p, pp)), policy) for p in range(pp) for t in range(tp)} for d in range(dp)
    }
    assert all(len(group) == 1 for group in groups.values())
    labels = [label for group in groups.values() for label in next(iter(group))]
    expected = {
        Rank((t, tp), (d, dp), (pp - 1, pp)).label for d in range(dp) for t in range(tp if policy == "shard" else 1)
    }
    assert sorted(labels) == sorted(expected)


@pytest.mark.parametrize("bad", [{"tp": (1, 1)}, {"dp": (-1, 2)}, {"pp": (0, 0)}])
def test_impossible_ranks(bad: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Rank(**bad)


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="'both'"):
        senders(Rank(), "both")


@given(spans, st.integers(0, 60))
def test_ranges_are_a_set_of_rows(added: list[list[int]], rows: int) -> None:
    ranges, model = Ranges(), set()
    for start, stop in added:
        assert ranges.reaches(start) == any(row >= start for row in model)
        ranges.add(start, stop)
        model.update(range(start, stop))
    assert [row for start, stop in ranges.spans for row in range(start, stop)] == sorted(model)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges.spans))
    rows = max([rows, *(row + 1 for row in model)])
    missing = [row for start, stop in ranges.missing(rows) for row in range(start, stop)]
    assert missing == sorted(set(range(rows)) - model)


class Group:
    """Some ranks under policy shard, and what a few writes make of a sample."""

    def __init__(self, url: str, count: int) -> None:
        ranks = [Rank(tp=(n, count)) for n in range(count)]
        self.sinks = [hsxfer.open_sink(f"{url}?capacity=1MiB", rank, "shard", instance=f"of-{count}") for rank in ranks]

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def send(self, rows: int, writes: list[tuple[int, int]]) -> tuple[hsxfer.Handle, np.ndarray]:
        model = np.zeros((rows, 2), "int32")
        tickets = [sink.begin(None, {"x": ((rows, 2), "int32")}) for sink in self.sinks]
        for number, (start, stop) in enumerate(writes):
            model[start:stop] = pattern(number, (stop - start, 2), "int32")
            for ticket in tickets:
                ticket.write("x", start, model[start:stop].copy())
        (handle,) = {ticket.commit() for ticket in tickets}
        return handle, model


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_request_that_starts_again_with_other_chunks_finds_room_in_its_part(store: str, count: int) -> None:
    group = Group(store, count)
    with hsxfer.open_source(store) as source:
        for sizes in ((100, 64), (64, 100), (37, 1000), (1000, 37), (128, 128), (50, 41, 33)):
            writes = [(start, min(start + size, 1000)) for size in sizes for start in range(0, 1000, size)]
            handle, model = group.send(1000, writes)
            with source.get(handle, framework="numpy", verify=True) as sample:
                assert (sample["x"] == model).all(), sizes
    group.close()


def test_shards_hold_the_last_write_or_say_why_not(store: str) -> None:
    groups = {count: Group(store, count) for count in (2, 3, 4)}
    source = hsxfer.open_source(store)
    outcomes = []

    @given(writes=spans.map(lambda writes: [(0, 60), *map(tuple, writes)]), count=st.integers(2, 4))
    def check(writes: list[tuple[int, int]], count: int) -> None:
        handle, model = groups[count].send(60, writes)
        try:
            with source.get(handle, framework="numpy", verify=True) as sample:
                assert (sample["x"] == model).all()
            outcomes.append("whole")
        except hsxfer.SampleFailed as error:
            outcomes.append(error.reason)

    check()
    for group in groups.values():
        group.close()
    assert all(outcome == "whole" or "rows written again used" in outcome for outcome in outcomes)
    assert outcomes.count("whole") > len(outcomes) / 2

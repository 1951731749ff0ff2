"""The fake engine: its samples are right in every shape, and `check_rows` sees each way in which they could be wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import hsxfer
from hsxfer.testing import LAST, FakeEngine, FakeRequest, check_rows, coded_rows, token_ids_of

SHAPES = [
    {},
    {"tp": 4, "dp": 2, "pp": 2},
    {"tp": 2, "policy": "shard"},
    {"tp": 3, "dp": 2, "pp": 2, "policy": "shard", "layers": (2, 5)},
    {"tp": 2, "disorder": 0.2, "layers": (1, 3, 30), "hidden_size": 50},
    {"tp": 2, "disorder": 0.2, "policy": "shard"},
]


def run(engine: FakeEngine, sizes: list[int]) -> list[FakeRequest]:
    requests = [engine.submit(rows, hidden_states=number % 3 != 2) for number, rows in enumerate(sizes)]
    engine.run()
    return requests


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_of_every_request_arrives(store: str, shape: dict[str, Any]) -> None:
    with FakeEngine(store + "?capacity=8MiB", **shape) as engine, hsxfer.open_source(store) as source:
        for request in run(engine, [0, 1, 63, 0, 64, 65, 1, 160, 161, 7, 500, 333]):
            if not request.hidden_states:
                assert request.handle is None
                continue
            assert request.handle is not None
            with source.get(request.handle, verify=True) as sample:
                check_rows(sample)
                assert len(sample) == (2 if shape.get("layers") else 1)
        for (_, stage, tensor_rank), sink in engine.sinks.items():
            leads = stage == shape.get("pp", 1) - 1 and (tensor_rank == 0 or shape.get("policy") == "shard")
            assert sink.sends == leads
            assert (sink.stats()["num_bytes"] > 0) == leads
            assert sink.stats()["used_bytes"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_hold_the_codes_exactly(store: str, dtype: str) -> None:
    codes = coded_rows(200_000, 70_000, 70_010, layers=[3, LAST], hidden_size=40, dtype="float64", attempt=7)
    there_and_back = coded_rows(200_000, 70_000, 70_010, layers=[3, LAST], hidden_size=40, dtype=dtype, attempt=7)
    assert torch.equal(there_and_back.double(), codes)
    with FakeEngine(store + "?capacity=1MiB", dtype=dtype) as engine:
        request = engine.submit(100)
        engine.run()
        for framework in ("torch", "numpy"):
            with hsxfer.open_source(store).get(request.handle, framework=framework, ack=False) as sample:
                check_rows(sample)


def test_rows_differ_in_everything_they_tell() -> None:
    seen = set()
    for request, position, layer, attempt in itertools.product(
        (0, 1, 8, 4095), (0, 1, 7, 8, 60_000), (0, 1, LAST), (0, 1)
    ):
        row = coded_rows(
            request, position, position + 1, layers=[layer], hidden_size=18, dtype="int64", attempt=attempt
        )
        seen.add(tuple(row.flatten().tolist()))
    assert len(seen) == 4 * 5 * 3 * 2


class Doctored:
    """A sample with its tensors replaced."""

    def __init__(self, sample: hsxfer.Sample, **changed: Any) -> None:
        self.handle, self.meta, self.rows = sample.handle, sample.meta, sample.rows
        self.token_ids = changed.pop("token_ids", sample.token_ids)
        self._tensors = {name: sample[name] for name in sample} | changed

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]


def code(request: int, first: int, last: int, attempt: int = 0) -> torch.Tensor:
    return coded_rows(request, first, last, layers=[2, 5], hidden_size=32, dtype="bfloat16", attempt=attempt)


WRONG = {
    "rows in another order": (lambda good: good.flip(0), "row 0 .*'position': 0.*'position': 99"),
    "shifted by one": (lambda good: torch.cat([good[:50], good[49:-1]]), "row 50 .*'position': 50.*'position': 49"),
    "another request's": (lambda good: torch.cat([good[:99], code(7, 99, 100)]), "row 99 .*'request': 0.*'request': 7"),
    "an older attempt's": (lambda good: torch.cat([good[:3], code(0, 3, 100, 1)]), "row 3 .*'attempt': 0.*'attempt': 1"),
    "layers exchanged": (lambda good: torch.cat([good[:, 32:], good[:, :32]], 1), "layer 2: .*'layer': 2.*'layer': 5"),
    "columns shifted": (lambda good: good.roll(18, 1), "row 0 "),
    "never written": (lambda good: torch.cat([good[:98], torch.zeros_like(good[:2])]), "row 98 .*no code.*2 rows"),
    "one value": (lambda good: good.index_put((torch.tensor(9), torch.tensor(63)), torch.tensor(9.0).bfloat16()), "row 9 "),
    "too few": (lambda good: good[1:], "99 rows"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_rows_are_found(store: str, what: str) -> None:
    damage, message = WRONG[what]
    with FakeEngine(store + "?capacity=1MiB", layers=(2, 5)) as engine:
        request = engine.submit(100)
        engine.run()
        with hsxfer.open_source(store).get(request.handle, copy=True) as sample:
            check_rows(sample)
            with pytest.raises(AssertionError, match=message):
                check_rows(Doctored(sample, hidden_states=damage(sample["hidden_states"])))  # type: ignore[arg-type]


def test_wrong_token_ids_are_found(store: str) -> None:
    with FakeEngine(store + "?capacity=1MiB") as engine:
        request = engine.submit(10)
        engine.run()
        with hsxfer.open_source(store).get(request.handle) as sample:
            with pytest.raises(AssertionError, match="token ids"):
                check_rows(Doctored(sample, token_ids=token_ids_of(1, 10)))  # type: ignore[arg-type]


def test_a_part_of_the_rows_is_checked_by_position(store: str) -> None:
    with FakeEngine(store + "?capacity=1MiB") as engine:
        request = engine.submit(200)
        engine.run()
        with hsxfer.open_source(store).get(request.handle, rows=slice(70, 90)) as sample:
            check_rows(sample)
            assert sample["hidden_states"].shape == (20, 32)


def test_a_retracted_request_starts_again_and_its_last_rows_hold(store: str) -> None:
    with FakeEngine(store + "?capacity=1MiB", chunk_tokens=32) as engine:
        request = engine.submit(100)
        for _ in range(3):
            engine.step()
        engine.retract(request)
        engine.run()
        with hsxfer.open_source(store).get(request.handle) as sample:
            assert check_rows(sample) == 1


def test_an_aborted_request_fails_with_its_reason(store: str) -> None:
    with FakeEngine(store + "?capacity=1MiB", chunk_tokens=32) as engine:
        request = engine.submit(100)
        engine.step()
        engine.abort(request, "nobody waits for it")
        engine.run()
        assert request.state == "aborted"
        with pytest.raises(hsxfer.SampleFailed, match="nobody waits for it") as caught:
            hsxfer.open_source(store).get(request.handle)
        assert caught.value.missing == {"hidden_states": [(32, 100)]}
        assert engine.sinks[0, 0, 0].stats()["used_bytes"] == 0


def test_requests_wait_for_space_while_plain_ones_go_on(store: str) -> None:
    with FakeEngine(store + "?capacity=20000") as engine, hsxfer.open_source(store) as source:
        first, second, plain, giant = (
            engine.submit(200),
            engine.submit(200),
            engine.submit(300, hidden_states=False),
            engine.submit(1000),
        )
        with pytest.raises(hsxfer.TransferTimeout):
            engine.run(timeout_s=0.2)
        assert (first.state, second.state, plain.state, giant.state) == ("finished", "waiting", "finished", "rejected")
        with pytest.raises(hsxfer.SampleFailed, match="72000 bytes"):
            source.get(giant.handle)
        with source.get(first.handle) as sample:
            check_rows(sample)
        del sample
        engine.run()
        with source.get(second.handle) as sample:
            check_rows(sample)


def test_a_row_too_narrow_for_its_code_is_refused() -> None:
    with pytest.raises(hsxfer.ConfigError, match="hidden_size 17"):
        coded_rows(0, 0, 1, layers=[0], hidden_size=17, dtype="float32")

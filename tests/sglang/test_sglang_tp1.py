"""One rank, overlap scheduling off, Engine, typed messages between sglang's processes (SGLANG_USE_PICKLE_IPC=0)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import BIT_LENGTHS, STORE, Reference, Stock, prompt
from servers import Config, Servers

import hsxfer

CONFIG = Config(
    "tp1",
    # So little cache, and such trust in it, that requests have to be retracted.
    {
        "chunked_prefill_size": -1,
        "disable_overlap_schedule": True,
        "max_total_tokens": 1600,
        "schedule_conservativeness": 0.1,
    },
    {"HSXFER_SINK": f"{STORE}?capacity=8MiB&block_s=5", "SGLANG_USE_PICKLE_IPC": "0"},
)
GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def engine(stock_tp1: Stock, tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> Any:
    CONFIG.environment["HSXFER_STATS_DIR"] = str(tmp_path_factory.mktemp("stats"))
    return servers.use(CONFIG)


def states(source: Any, reply: dict[str, Any]) -> torch.Tensor:
    """The reply's states, a copy; nothing stays behind in the store."""
    with source.get(hsxfer.Handle.from_meta_info(reply), timeout_s=30) as sample:
        return sample["hidden_states"].clone()


@pytest.mark.parametrize("number", range(len(BIT_LENGTHS)))
def test_values_are_those_of_stock_sglang_bit_for_bit(engine: Any, source: Any, stock_tp1: Stock, number: int) -> None:
    ids = prompt(BIT_LENGTHS[number])
    reply = engine.generate(input_ids=ids, sampling_params=GREEDY, return_hidden_states=True)
    got = states(source, reply)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.float(), stock_tp1.states(number))
    assert reply["output_ids"] == stock_tp1.replies[number]["output_ids"]


@pytest.mark.parametrize("max_new_tokens", [0, 1, 8])
def test_rows_are_the_prompts_tokens_whatever_is_generated(
    engine: Any, source: Any, reference: Reference, max_new_tokens: int
) -> None:
    ids = prompt(40, seed=max_new_tokens)
    reply = engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        return_hidden_states=True,
    )
    assert len(reply["output_ids"]) == max_new_tokens
    handle = hsxfer.Handle.from_meta_info(reply)
    assert handle.rows == (0, 40)
    with pytest.raises(hsxfer.ConfigError):
        source.get(handle, rows=slice(0, 41))
    with source.get(handle) as sample:
        reference.check(sample["hidden_states"], ids)
        assert sample.token_ids.tolist() == ids
        sample.check(token_ids=ids)


def test_a_batch_with_and_without_hidden_states(engine: Any, source: Any, reference: Reference) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((3, 150, 20, 77, 1, 300))]
    wanted = [True, False, True, True, False, True]
    replies = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_hidden_states=wanted)
    for ids, want, reply in zip(prompts, wanted, replies, strict=True):
        assert ("hidden_states" in reply["meta_info"]) == want
        if want:
            reference.check(states(source, reply), ids)


def test_the_cache_serves_those_who_want_no_hidden_states(engine: Any, source: Any, reference: Reference) -> None:
    ids = prompt(120, seed=9)
    replies = [
        engine.generate(input_ids=ids, sampling_params=GREEDY, return_hidden_states=want)
        for want in (False, False, True, True)
    ]
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 119, 0, 0]
    for reply in replies[2:]:
        reference.check(states(source, reply), ids)


def test_requests_that_are_retracted_for_lack_of_cache(engine: Any, source: Any, reference: Reference) -> None:
    prompts = [prompt(150, seed=20 + number) for number in range(8)]
    lengthy = {"temperature": 0, "max_new_tokens": 80}  # with ignore_eos sglang would plan for them and retract none
    replies = engine.generate(input_ids=prompts, sampling_params=lengthy, return_hidden_states=True)
    assert sum(reply["meta_info"]["num_retractions"] for reply in replies) > 0
    for ids, reply in zip(prompts, replies, strict=True):
        reference.check(states(source, reply), ids)


def test_only_the_last_row_is_refused_in_words(engine: Any, source: Any) -> None:
    reply = engine.generate(input_ids=prompt(10), sampling_params=GREEDY, return_hidden_states="last")
    with pytest.raises(hsxfer.SampleFailed, match="last"):
        states(source, reply)


def test_nothing_is_left_in_the_store(engine: Any) -> None:
    stats = engine.stats(used_bytes=0)
    assert stats["num_failed"] == 0
    assert stats["num_committed"] + stats["num_rejected"] == stats["num_requests"] > 0

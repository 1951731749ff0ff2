"""Two ranks, overlap scheduling on, HTTP: chunks of 64 tokens mixed with decoding, radix cache, forced retractions."""

from __future__ import annotations

import random
import time
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from reference import BIT_LENGTHS, STORE, Reference, Stock, prompt
from servers import Config, HttpServer, Servers

import hsxfer

CAPACITY_BYTES = 1 << 20
BLOCK_S = 8.0
ROW_BYTES = 192 * 2 + 8  # a row of states, and its token id

CONFIG = Config(
    "tp2",
    {"tp_size": 2, "chunked_prefill_size": 64, "enable_mixed_chunk": True},
    {
        "HSXFER_SINK": f"{STORE}?capacity={CAPACITY_BYTES}&block_s={BLOCK_S:g}",
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": "17",
    },
    http=True,
)
GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, servers: Servers) -> Any:
    CONFIG.environment["HSXFER_STATS_DIR"] = str(tmp_path_factory.mktemp("stats"))
    return servers.use(CONFIG)


@pytest.fixture(autouse=True)
def in_step(server: HttpServer, source: Any, reference: Reference) -> Any:
    """After every test: both ranks still work together, every row arrives, nothing is left in the store."""
    yield
    ids = prompt(70, seed=random.randrange(1000))
    check(source, server.generate(input_ids=ids, sampling_params=GREEDY, return_hidden_states=True), ids, reference)
    server.stats(used_bytes=0)


def states(source: Any, reply: dict[str, Any], timeout_s: float = 30) -> torch.Tensor:
    with source.get(hsxfer.Handle.from_meta_info(reply), timeout_s=timeout_s) as sample:
        return sample["hidden_states"].clone()


def check(source: Any, reply: dict[str, Any], ids: list[int], reference: Reference) -> None:
    reference.check(states(source, reply), ids)


def wanting(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": GREEDY, "return_hidden_states": True, **more}


def reason(source: Any, reply: dict[str, Any]) -> str:
    """Why the sample failed; at once, not after a wait."""
    start = time.monotonic()
    with pytest.raises(hsxfer.SampleFailed) as failed:
        states(source, reply)
    assert time.monotonic() - start < 2
    return failed.value.reason


def test_values_are_those_of_stock_sglang_bit_for_bit(
    stock_tp2: Stock, tmp_path_factory: pytest.TempPathFactory, servers: Servers, source: Any
) -> None:
    server = servers.use(CONFIG)
    for number, length in enumerate(BIT_LENGTHS):
        if length <= 64:  # one chunk
            got = states(source, server.generate(**wanting(prompt(length))))
            assert torch.equal(got.float(), stock_tp2.states(number))


@pytest.mark.parametrize("length", [63, 64, 65, 128, 500])
def test_every_row_of_a_prompt_in_chunks(server: Any, source: Any, reference: Reference, length: int) -> None:
    check(source, server.generate(**wanting(prompt(length, seed=length))), prompt(length, seed=length), reference)


@pytest.mark.parametrize("max_new_tokens", [0, 1, 8])
def test_rows_are_the_prompts_tokens_whatever_is_generated(
    server: Any, source: Any, reference: Reference, max_new_tokens: int
) -> None:
    ids = prompt(100, seed=40 + max_new_tokens)
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    reply = server.generate(**wanting(ids, sampling_params=sampling))
    assert len(reply["output_ids"]) == max_new_tokens
    check(source, reply, ids, reference)


def test_cached_prompts_have_every_row_and_the_cache_stays_on(server: Any, source: Any, reference: Reference) -> None:
    ids = prompt(200, seed=50)
    replies = [server.generate(**wanting(ids, return_hidden_states=want)) for want in (False, False, True, True)]
    cached = [reply["meta_info"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0 < cached[1]
    assert cached[2:] == [0, 0]
    longer = ids + prompt(30, seed=51)
    replies.append(server.generate(**wanting(longer)))
    for reply, sent in zip(replies[2:], (ids, ids, longer), strict=True):
        check(source, reply, sent, reference)


def test_batches_mixed_and_split_with_others_decoding(server: Any, source: Any, reference: Reference) -> None:
    decoding = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    generator = random.Random(0)
    requests = []
    for number in range(24):
        ids = prompt(generator.choice((1, 7, 30, 64, 90, 150)), seed=60 + number)
        want, sampling = generator.random() < 0.6, generator.choice((decoding, GREEDY))
        requests.append(wanting(ids, return_hidden_states=want, sampling_params=sampling))
    pending = []
    for number, request in enumerate(requests):
        pending.append(server.submit(**request))
        if number % 5 == 4:
            time.sleep(0.2)
    num_retractions = 0
    for request, future in zip(requests, pending, strict=True):
        reply = future.result(120)
        num_retractions += reply["meta_info"]["num_retractions"]
        assert ("hidden_states" in reply["meta_info"]) == request["return_hidden_states"]
        if request["return_hidden_states"]:
            check(source, reply, request["input_ids"], reference)
    assert num_retractions > 0


def test_one_request_for_a_batch_of_prompts(server: Any, source: Any, reference: Reference) -> None:
    prompts = [prompt(length, seed=90 + length) for length in (5, 200, 31)]
    wanted = [True, True, False]
    replies = server.generate(input_ids=prompts, sampling_params=GREEDY, return_hidden_states=wanted)
    for ids, want, reply in zip(prompts, wanted, replies, strict=True):
        assert ("hidden_states" in reply["meta_info"]) == want
        if want:
            check(source, reply, ids, reference)


def test_several_samples_of_a_prompt_have_states_each_and_the_warm_up_none(
    server: Any, source: Any, reference: Reference
) -> None:
    before = server.stats()["num_requests"]
    ids = prompt(100, seed=100)
    replies = server.generate(**wanting(ids, sampling_params={"max_new_tokens": 3, "n": 3, "temperature": 0.9}))
    keys = {hsxfer.Handle.from_meta_info(reply).key for reply in replies}
    assert len(keys) == 3
    for reply in replies:
        check(source, reply, ids, reference)
    assert server.stats()["num_requests"] == before + 3
    replies = server.generate(**wanting(ids, sampling_params={"max_new_tokens": 0, "n": 2}))
    for reply in replies:
        check(source, reply, ids, reference)


def test_log_probabilities_beside_hidden_states(server: Any, source: Any, reference: Reference) -> None:
    ids = prompt(150, seed=110)
    reply = server.generate(**wanting(ids, return_logprob=True, logprob_start_len=10))
    assert len(reply["meta_info"]["input_token_logprobs"]) == 140
    check(source, reply, ids, reference)


@pytest.mark.parametrize(
    "rid", ["a b", "../../etc/passwd", "x" * 3000, "zeile\nzwei", "schön", "\u2028", '{"key": 1}', "-", "hsxfer:1:"]
)
def test_request_ids_of_all_kinds(server: Any, source: Any, reference: Reference, rid: str) -> None:
    ids = prompt(20, seed=120)
    reply = server.generate(**wanting(ids, rid=rid))
    assert reply["meta_info"]["id"] == rid
    check(source, reply, ids, reference)


def test_a_cache_key_of_the_clients_own_cannot_take_anothers_states(
    server: Any, source: Any, reference: Reference
) -> None:
    requests = [wanting(prompt(80, seed=130 + number), extra_key=f"hsxfer:{number}:") for number in range(4)]
    requests += [wanting(prompt(80, seed=140), extra_key="hsxfer:1:", return_hidden_states=False)]
    futures = [server.submit(**request) for request in requests]
    for request, future in zip(requests[:4], futures[:4], strict=True):
        check(source, future.result(60), request["input_ids"], reference)


def test_the_other_rank_copies_and_converts_nothing(server: Any) -> None:
    mine, other = server.stats("dp0-pp0-tp0"), server.stats("dp0-pp0-tp1")
    assert mine["num_bytes"] == mine["num_rows"] * 192 * 2 > 0
    assert mine["sink"]["num_published"] == mine["num_committed"] > 0
    assert mine["cpu_s"] > 0
    names = ("num_requests", "num_forwards", "num_writes", "num_rows", "num_bytes", "num_committed", "cpu_s")
    assert {name: other[name] for name in names} == dict.fromkeys(names, 0)
    assert not any(other["sink"].values())


# A full store.


def fill(server: Any) -> list[tuple[dict[str, Any], list[int]]]:
    """Replies that nobody has read and their prompts, until there is no room for another of their size."""
    prompts = [prompt(300, seed=200 + number) for number in range(CAPACITY_BYTES // (300 * ROW_BYTES))]
    return list(zip(server.generate(**wanting(prompts)), prompts, strict=True))


def read_all(source: Any, replies: list[tuple[dict[str, Any], list[int]]]) -> list[tuple[torch.Tensor, list[int]]]:
    """Only reads, and leaves the looking for later: somebody waits for the room."""
    return [(states(source, reply), ids) for reply, ids in replies]


def test_a_full_store_fails_in_time_while_others_are_served(server: Any, source: Any, reference: Reference) -> None:
    filling = fill(server)
    start = time.monotonic()
    late = [server.submit(**wanting(prompt(300, seed=300 + number))) for number in range(2)]
    for number in range(3):
        plain = server.generate(**wanting(prompt(50, seed=310 + number), return_hidden_states=False))
        assert len(plain["output_ids"]) == 4
    assert time.monotonic() - start < BLOCK_S
    assert not any(future.done() for future in late)
    for future in late:
        assert "StoreFull" in reason(source, future.result(60))
    assert BLOCK_S <= time.monotonic() - start < BLOCK_S + 10
    for rows, ids in read_all(source, filling):
        reference.check(rows, ids)


def test_a_reader_that_appears_revives_the_store(server: Any, source: Any, reference: Reference) -> None:
    filling = fill(server)
    prompts = [prompt(300, seed=320 + number) for number in range(len(filling) + 1)]
    late = [server.submit(**wanting(ids)) for ids in prompts]
    assert not wait(late, 0.5).done
    got = read_all(source, filling)
    for future, ids in zip(late, prompts, strict=True):
        got += read_all(source, [(future.result(60), ids)])
    for rows, ids in got:
        reference.check(rows, ids)


def test_a_prompt_larger_than_the_store_fails_at_once(server: Any, source: Any) -> None:
    start = time.monotonic()
    reply = server.generate(**wanting(prompt(CAPACITY_BYTES // ROW_BYTES + 100)))
    assert "StoreFull" in reason(source, reply)
    assert time.monotonic() - start < BLOCK_S  # what the prefill takes, and no wait for room


# Aborts.


def test_abort_while_waiting_for_room(server: Any, source: Any, reference: Reference) -> None:
    filling = fill(server)
    late = server.submit(**wanting(prompt(300, seed=340), rid="waits"))
    assert not wait([late], 0.5).done
    server.post("/abort_request", rid="waits")
    assert late.result(BLOCK_S / 2)["meta_info"]["finish_reason"]["type"] == "abort"
    for rows, ids in read_all(source, filling):
        reference.check(rows, ids)


def complete(source: Any, info: dict[str, Any]) -> bool:
    """Whether the sample has every row; if not, its reader is told why."""
    try:
        source.get(hsxfer.Handle.from_meta_info(info), ack=False).release()
    except hsxfer.SampleFailed as failed:
        return not failed.reason.startswith("the request ended before its prompt was processed")
    return True


@pytest.mark.parametrize("delay_s", [0.01, 0.05, 0.2, 0.5])
def test_abort_in_mid_work(server: Any, source: Any, reference: Reference, delay_s: float) -> None:
    """Waiting, in the middle of its chunks, or decoding: what arrives is whole, and the room comes back."""
    ids = prompt(900, seed=350)
    long = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
    busy = [server.submit(**wanting(prompt(300, seed=360 + n), return_hidden_states=False)) for n in range(3)]
    aborted = server.submit(**wanting(ids, rid="aborted", sampling_params=long))
    while not aborted.done():
        time.sleep(delay_s)
        server.post("/abort_request", rid="aborted")
    info = aborted.result()["meta_info"]
    assert info["finish_reason"]["type"] == "abort"
    if "hidden_states" in info and complete(source, info):
        check(source, info, ids, reference)
    wait(busy, 60)

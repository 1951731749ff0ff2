"""Handles: a round trip, and everything that somebody could send instead of one."""

from __future__ import annotations

import array
import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsxfer import Handle, HandleError, TensorSpec
from hsxfer.handle import ITEM_BYTES, MAX_JSON_BYTES, check_key, token_hash, token_ids_array

GOOD: dict[str, Any] = {
    "hsxfer": 0,
    "store": "shm://spec-train",
    "instance": "0123abcd",
    "key": "req-17",
    "rid": "req",
    "rows": [0, 8],
    "tensors": {"hidden_states": {"dtype": "bfloat16", "shape": [8, 64]}},
    "layers": [2, 14, -1],
    "convention": "after-block",
    "policy": "shard",
    "ranks": ["dp0-pp0-tp0", "dp0-pp0-tp1"],
    "consumers": 2,
    "token_hash": "0123456789abcdef",
    "model": "llama",
}

names = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True).filter(lambda name: name != "token_ids")
texts = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@st.composite
def handles(draw: st.DrawFn) -> Handle:
    start, rows = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
    shapes = st.tuples(st.just(rows), *[st.integers(0, 64)] * draw(st.integers(0, 3)))
    spec = st.builds(TensorSpec, st.sampled_from(sorted(ITEM_BYTES)), shapes)
    return Handle(
        store="shm://" + draw(names),
        instance=draw(st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True)),
        key=draw(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=60)),
        rows=(start, start + rows),
        tensors=draw(st.dictionaries(names, spec, min_size=1, max_size=5)),
        ranks=tuple(draw(st.lists(st.from_regex(r"dp[0-9]-pp[0-9]-tp[0-9]", fullmatch=True), min_size=1, unique=True))),
        policy=draw(st.sampled_from(["leader", "shard"])),
        rid=draw(texts),
        consumers=draw(st.integers(1, 65535)),
        layers=draw(st.none() | st.lists(st.integers(-1, 1000), max_size=5).map(tuple)),
        convention=draw(texts),
        token_hash=draw(st.none() | st.from_regex(r"[0-9a-f]{16}", fullmatch=True)),
        model=draw(texts),
    )


@given(handles())
def test_a_handle_comes_back_equal_from_each_of_its_forms(handle: Handle) -> None:
    text = handle.to_json()
    for form in (text, text.encode(), bytearray(text.encode()), handle.to_dict(), json.loads(text)):
        assert Handle.from_json(form) == handle
    assert hash(Handle.from_json(text)) == hash(handle)


def test_the_good_one_is_good() -> None:
    assert Handle.from_json(GOOD).to_dict() == GOOD


BAD = {
    "hsxfer": [1, "0", None, True, 0.0, 10**5000],
    "store": [None, "", "spec-train", "shm://../other", "shm://a/b", "shm://a?dir=/tmp", "shm://a\n", 7, "SHM://a"],
    "instance": ["", "../../etc", "a/b", "a.b", "i" * 33, None, 1, "\ud800", "é"],
    "key": ["", None, 3, "a\nb", "a\0b", "\ud800", "\u202e", "k" * 257, "é" * 129, ["a"], b"a"],
    "rid": [3, [], {}, "r" * 2000, True],
    "rows": [
        *(None, [], [0], [0, 8, 9], [8, 0], [-1, 7], [0, 8.0], [0.0, 8], ["0", "8"], [0, True], [0, math.nan], 8, "08"),
        *([0, 9], [0, 2**41], [0, 10**5000], {"0": 8}),
    ],
    "tensors": [None, {}, [], "x", {"hidden_states": None}, {"hidden_states": ["bfloat16", [8, 64]]}]
    + [{"token_ids": {"dtype": "int64", "shape": [8]}}]
    + [{name: {"dtype": "int8", "shape": [8]}} for name in ("", "../x", "a b", "n" * 65, "é", 5, "a\n")]
    + [{"x": {"dtype": dtype, "shape": [8]}} for dtype in (None, "float", "torch.int8", "object", "", 3, ["int8"])]
    + [{"x": {"dtype": "int8", "shape": shape}} for shape in (None, [], 8, "8", [7], [8, -1], [8, 1.5], [8, True])]
    + [{"x": {"dtype": "int8", "shape": shape}} for shape in ([8, 2**50], [8, 2**39, 2**39], [8] + [1] * 8, [8, None])]
    + [{"x": {"dtype": "int8", "shape": [8, 0, 2**40, 2**40]}}]
    + [{"x": {"dtype": "int8", "shape": [8]}, "y": {"dtype": "int8", "shape": [9]}}]
    + [{"x": {"dtype": "int8", "shape": [8], "offset": 4096}}, {"x": {"dtype": "int8"}}]
    + [{f"t{n}": {"dtype": "int8", "shape": [8]} for n in range(65)}],
    "layers": [3, "2,14", [1.5], [True], [-2], [2**30], [None], [[2]], list(range(2000))],
    "convention": [1, [], "c" * 2000],
    "policy": [None, "", "LEADER", "both", 1, ["leader"]],
    "ranks": [
        *(None, [], "dp0-pp0-tp0", ["0"], ["dp0-pp0-tp0"] * 2, ["../dp0-pp0-tp0"], ["dp0-pp0-tp0/.."], [None]),
        *(["dp\u0663-pp0-tp0"], ["dp0-pp0-tp0\n"], [f"dp0-pp0-tp{n}" for n in range(5000)]),
    ],
    "consumers": [0, -1, 65536, 1.0, True, "1", None, 10**5000],
    "token_hash": [0, "", "0123", "0123456789ABCDEF", "g" * 16, "0" * 17, "0123456789abcde\n"],
    "model": [1, {}, "m" * 2000],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field}-{n}") for field, values in BAD.items() for n, value in enumerate(values)],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(HandleError) as caught:
        Handle.from_json({**GOOD, field: value})
    message = str(caught.value)
    word = {"hsxfer": "version", "ranks": "rank", "layers": "layer", "tensors": "tensor"}.get(field, field)
    assert word in message
    assert len(message) < 500


@pytest.mark.parametrize("field", sorted(GOOD))
def test_an_entry_too_few(field: str) -> None:
    with pytest.raises(HandleError, match=field):
        Handle.from_json({key: value for key, value in GOOD.items() if key != field})


@pytest.mark.parametrize("extra", ["path", "offset", "", "\ud800", 5, None, ("a", 1), "x" * 100_000])
def test_an_entry_too_many(extra: Any) -> None:
    with pytest.raises(HandleError, match="unknown") as caught:
        Handle.from_json({**GOOD, extra: 1})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("cut", range(0, len(json.dumps(GOOD)), 7))
def test_truncated_json(cut: int) -> None:
    with pytest.raises(HandleError):
        Handle.from_json(json.dumps(GOOD)[:cut])


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "null", "[]", "3", '"{}"', "NaN", "{}", b"\x80abc", b"\xff\xfe{"),
        *("{" * 50_000, "[" * 50_000 + "]" * 50_000, '{"a":' * 20_000, " " * (MAX_JSON_BYTES + 1)),
        *('{"hsxfer": ' + "9" * 5000 + "}", json.dumps(GOOD) + "x"),
    ],
    ids=range(16),
)
def test_no_handle_at_all(text: Any) -> None:
    with pytest.raises(HandleError) as caught:
        Handle.from_json(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("thing", [None, 3, 1.5, [GOOD], (), object(), memoryview(b"{}")])
def test_neither_text_nor_dict(thing: Any) -> None:
    with pytest.raises(HandleError, match="JSON or a dict"):
        Handle.from_json(thing)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(GOOD)), anything)
def test_whatever_is_accepted_comes_back(field: str, value: Any) -> None:
    try:
        handle = Handle.from_json({**GOOD, field: value})
    except HandleError:
        return
    assert Handle.from_json(handle.to_json()) == handle


@given(st.text() | st.binary())
def test_noise_is_refused(noise: str | bytes) -> None:
    with pytest.raises(HandleError):
        Handle.from_json(noise)


def test_meta_info_with_a_handle() -> None:
    handle = Handle.from_json(GOOD)
    for found in (GOOD, [GOOD], handle.to_json(), [handle.to_json()]):
        assert Handle.from_meta_info({"hidden_states": found, "prompt_tokens": 8}) == handle
        assert Handle.from_meta_info({"text": "", "meta_info": {"hidden_states": found}}) == handle


@pytest.mark.parametrize("floats", [[[0.1, 0.2]], [[[0.1]]], [0.1], 0.5, [[1, 2]], [[]], [[[]]]])
def test_meta_info_with_numbers_says_that_the_plugin_was_not_active(floats: Any) -> None:
    with pytest.raises(HandleError, match="plugin was not active"):
        Handle.from_meta_info({"hidden_states": floats})


@pytest.mark.parametrize("meta_info", [{}, {"hidden_states": None}, {"hidden_states": []}, {"meta_info": {}}])
def test_meta_info_without_hidden_states(meta_info: Any) -> None:
    with pytest.raises(HandleError, match="return_hidden_states"):
        Handle.from_meta_info(meta_info)


@pytest.mark.parametrize("meta_info", [None, [], "x", {"hidden_states": [object()]}, {"hidden_states": [b"x"]}])
def test_meta_info_of_another_kind(meta_info: Any) -> None:
    with pytest.raises(HandleError):
        Handle.from_meta_info(meta_info)


@pytest.mark.parametrize("key", ["a", "é" * 128, "req-17", "k" * 256, "日本"])
def test_good_keys(key: str) -> None:
    assert check_key(key) == key


def test_token_ids_from_anything_that_holds_ints() -> None:
    expected = array.array("q", [1, -2, 2**40])
    for ids in ([1, -2, 2**40], (1, -2, 2**40), iter([1, -2, 2**40]), np.array([1, -2, 2**40]), expected):
        assert token_ids_array(ids) == expected


@pytest.mark.parametrize("ids", [[1.5], ["a"], "abc", b"abc", [[1]], 3, [2**63], np.ones((2, 2)), None])
def test_token_ids_of_another_kind(ids: Any) -> None:
    with pytest.raises(HandleError, match="token_ids"):
        token_ids_array(ids)


def test_the_hash_of_token_ids_is_blake2b_of_little_endian_int64() -> None:
    expected = hashlib.blake2b(np.array([5, 6], "<i8").tobytes(), digest_size=8).hexdigest()
    assert token_hash(token_ids_array([5, 6])) == expected


def test_a_server_that_could_not_take_a_request_says_why():
    with pytest.raises(HandleError, match="no handle: 'the log says why'"):
        Handle.from_meta_info({"hidden_states": [{"error": "the log says why"}]})

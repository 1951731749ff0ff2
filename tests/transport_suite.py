"""What every transport does, whatever it is made of. A transport joins with

    class TestMine(TransportSuite):
        new_store = staticmethod(...)  # a context manager that yields the URL of a fresh store

Producer here, consumer in another process.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Peer, fetch, pattern, raw, source_of, told, wait_for

import hsxfer
from hsxfer.handle import ITEM_BYTES
from hsxfer.testing import FakeEngine

LIVELY_S = 5.0  # the bound within which the dead are noticed
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors])


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits, as a torch tensor of any dtype."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.from_numpy(pattern(seed, shape, "bool"))
    bits = torch.from_numpy(pattern(seed, (*shape, kind.itemsize)))
    return bits.reshape(-1).view(kind).reshape(shape)


DTYPES = sorted(dtype for dtype in ITEM_BYTES if hasattr(torch, dtype))
NUMPY_DTYPES = [dtype for dtype in DTYPES if hasattr(np, dtype) or hasattr(ml_dtypes, dtype)]

NOT_CONTIGUOUS: dict[str, Callable[[], Any]] = {
    "columns of a wider tensor": lambda: tensor_of("bfloat16", (20, 30))[:, 5:15],
    "every third row": lambda: tensor_of("float32", (30, 4))[::3],
    "every third row of some columns": lambda: tensor_of("int16", (30, 14))[1::3, 2:9],
    "rows with a column step": lambda: tensor_of("float16", (8, 24))[:, ::2],
    "transposed": lambda: tensor_of("float32", (6, 9)).T,
    "permuted": lambda: tensor_of("bfloat16", (3, 4, 5)).permute(1, 2, 0),
    "planes of a stack": lambda: tensor_of("bfloat16", (10, 3, 8))[:, 1],
    "one row expanded": lambda: tensor_of("float64", (1, 7)).expand(12, 7),
    "one column expanded": lambda: tensor_of("float32", (12, 1)).expand(12, 7),
    "one value expanded": lambda: torch.tensor(7, dtype=torch.int32).expand(5, 6),
    "overlapping rows": lambda: tensor_of("int8", (40,)).as_strided((10, 8), (3, 1)),
    "one dimension with a step": lambda: tensor_of("int64", (20,))[::2],
    "a view behind the start": lambda: tensor_of("float8_e5m2", (10, 8))[4:],
    "conjugated": lambda: tensor_of("complex64", (4, 5)).conj(),
    "the imaginary part of a conjugate": lambda: tensor_of("complex64", (4, 5)).conj().imag,
    "with a gradient": lambda: torch.randn(4, 5, requires_grad=True) * 2,
    "of inference mode": lambda: torch.inference_mode()(lambda: torch.ones(4, 5) * 3)(),
    "numpy, reversed rows": lambda: pattern(1, (9, 4), "int32")[::-1],
    "numpy, reversed columns": lambda: pattern(1, (9, 4), "int32")[:, ::-1],
    "numpy, Fortran order": lambda: np.asfortranarray(pattern(1, (9, 4), "float64")),
    "numpy, a field of records": lambda: np.zeros(9, np.dtype([("a", "i1"), ("x", "<i4")]))["x"],
    "numpy, broadcast": lambda: np.broadcast_to(pattern(1, (1, 4), "int16"), (9, 4)),
    "numpy, read-only": lambda: np.frombuffer(bytes(range(64)), "uint16").reshape(4, 8),
}


class TransportSuite:
    new_store: ClassVar[Callable[[], AbstractContextManager[str]]]

    @pytest.fixture(scope="class")
    @classmethod
    def consumer(cls) -> Iterator[Peer]:
        peer = Peer()
        yield peer
        peer.close()

    @pytest.fixture
    def url(self) -> Iterator[str]:
        with type(self).new_store() as url:
            yield url

    @pytest.fixture
    def sink(self, url: str) -> Iterator[hsxfer.Sink]:
        with hsxfer.open_sink(url + "?capacity=16MiB", model="m", layers=[2, 5], convention="c") as sink:
            yield sink

    @pytest.fixture
    def source(self, url: str) -> Iterator[hsxfer.Source]:
        with hsxfer.open_source(url) as source:
            yield source

    # ---- bytes -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype(self, url: str, sink: hsxfer.Sink, consumer: Peer, dtype: str) -> None:
        tensor = tensor_of(dtype, (9, 5))
        handle = sink.put({"x": tensor}, consumers=2)
        assert consumer(fetch, url, handle)["x"] == told(tensor)
        if dtype in NUMPY_DTYPES:
            assert consumer(fetch, url, handle, framework="numpy")["x"] == told(tensor)
        else:
            with pytest.raises(hsxfer.ConfigError, match=f"numpy has no {dtype}"):
                consumer(fetch, url, handle, framework="numpy")
            assert consumer(fetch, url, handle)["x"] == told(tensor), "the refusal did not use the sample up"

    @pytest.mark.parametrize("dtype", NUMPY_DTYPES)
    def test_every_dtype_from_numpy(self, url: str, sink: hsxfer.Sink, consumer: Peer, dtype: str) -> None:
        array = pattern(3, (9, 5), dtype)
        assert consumer(fetch, url, sink.put({"x": array}))["x"] == told(array)

    @shared
    @given(
        rows=st.integers(0, 40),
        widths=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
        dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
        options=st.fixed_dictionaries({"copy": st.booleans(), "verify": st.sampled_from([True, False, "auto"])}),
        seed=st.integers(0, 1000),
    )
    def test_random_shapes(
        self,
        url: str,
        sink: hsxfer.Sink,
        consumer: Peer,
        rows: int,
        widths: list[list[int]],
        dtypes: list[str],
        options: Any,
        seed: int,
    ) -> None:
        tensors = {
            f"t{n}": tensor_of(dtype, (rows, *width), seed)
            for n, (width, dtype) in enumerate(zip(widths, dtypes, strict=False))
        }
        got = consumer(fetch, url, sink.put(tensors, token_ids=range(rows)), **options)
        assert {name: got[name] for name in tensors} == {name: told(tensor) for name, tensor in tensors.items()}
        assert got["token_ids"] == list(range(rows))

    @pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
    def test_inputs_that_are_not_contiguous(self, url: str, sink: hsxfer.Sink, consumer: Peer, kind: str) -> None:
        tensor = NOT_CONTIGUOUS[kind]()
        plain = np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) else tensor.detach().clone().contiguous()
        if hasattr(plain, "resolve_conj"):
            plain = plain.resolve_conj().resolve_neg()
        assert consumer(fetch, url, sink.put({"x": tensor}), verify=True)["x"] == told(plain)

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (torch.tensor(1.0), "at least one dimension"),
            (torch.ones(3, 3).to_sparse(), "sparse"),
            (torch.ones(3, 3, device="meta"), "meta"),
            (torch.empty(3, dtype=torch.bits8), "bits8"),
            (np.array(3), "at least one dimension"),
            (np.array(["a"]), "<U1"),
            (np.array([object()]), "object|O"),
            (np.arange(3, dtype=">i4"), ">i4"),
            ([1.0, 2.0], "list"),
            (None, "NoneType"),
            ("text", "str"),
        ],
        ids=lambda value: value if isinstance(value, str) else type(value).__name__,
    )
    def test_what_is_no_tensor_of_bytes(self, sink: hsxfer.Sink, tensor: Any, message: str) -> None:
        with pytest.raises(hsxfer.ConfigError, match=message):
            sink.put({"x": tensor})
        assert sink.stats()["num_begun"] == 0

    def test_buffers_of_any_kind(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        import array

        for buffer, expected in (
            (b"abcd", np.frombuffer(b"abcd", "uint8")),
            (bytearray(b"abcd"), np.frombuffer(b"abcd", "uint8")),
            (array.array("d", [1.5, -2]), np.array([1.5, -2])),
            (array.array("i", []), np.array([], "int32")),
            (
                memoryview(np.arange(24, dtype="int16").reshape(4, 6))[::2],
                np.arange(24, dtype="int16").reshape(4, 6)[::2],
            ),
            (memoryview(bytes(8)).cast("f"), np.zeros(2, "float32")),
        ):
            assert consumer(fetch, url, sink.put({"x": buffer}))["x"] == told(np.ascontiguousarray(expected))

    def test_memoryviews_need_no_framework(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        for dtype in NUMPY_DTYPES:
            if dtype.startswith("complex"):
                continue
            tensor = tensor_of(dtype, (6, 2, 3))
            for copy in (False, True):
                with source.get(
                    sink.put({"x": tensor}, token_ids=range(6)), framework="memoryview", copy=copy
                ) as sample:
                    view = sample["x"]
                    assert (view.shape, view.readonly) == ((6, 2, 3), not copy)
                    assert view.itemsize == tensor.itemsize
                    assert view.tobytes() == raw(tensor)
                    assert sample.token_ids.tolist() == [*range(6)]
                    if dtype in ("float32", "int16", "uint64", "bool"):
                        assert repr(view.tolist()) == repr(tensor.tolist())
        with source.get(sink.put({"x": np.zeros((0, 4), "int16")}), framework="memoryview") as sample:
            assert (sample["x"].shape, sample["x"].format) == ((0,), "h")

    def test_the_source_may_change_after_flush(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        tensor = tensor_of("float32", (1000, 500))
        expected = told(tensor)
        handle = sink.put({"x": tensor})
        sink.flush()
        tensor.zero_()
        assert consumer(fetch, url, handle)["x"] == expected

    def test_a_source_is_let_go_when_it_has_moved(self, sink: hsxfer.Sink) -> None:
        """Also when no further call ever comes."""
        ticket = sink.begin("k", {"x": ((10, 4), "int32")})
        for _ in range(20):
            rows = pattern(1, (10, 4), "int32")
            alive = weakref.ref(rows)
            ticket.write("x", 0, rows)
            del rows
            wait_for(lambda: alive() is None, "the rows are let go", LIVELY_S)  # noqa: B023 - within the round

    def test_a_source_is_kept_until_it_has_moved(self, url: str) -> None:
        """Behind a long copy, so that it has not moved yet when its owner forgets it."""
        seen_alive = False
        with hsxfer.open_sink(url + "?capacity=128MiB") as sink:
            for _ in range(5):
                ticket = sink.begin(None, {"long": ((100, 1_000_000), "uint8"), "x": ((100, 4), "int32")})
                ticket.write("long", 0, np.ones((100, 1_000_000), "uint8"))
                rows = pattern(1, (100, 4), "int32")
                alive = weakref.ref(rows)
                ticket.write("x", 0, rows)
                del rows
                seen_alive |= alive() is not None
                ticket.abort("seen")
                sink.flush()
        assert seen_alive

    def test_a_source_that_the_caller_drops_is_kept_until_it_has_moved(
        self, url: str, sink: hsxfer.Sink, consumer: Peer
    ) -> None:
        expected = told(tensor_of("float32", (2000, 500), 5))
        handles = [sink.put({"x": tensor_of("float32", (2000, 500), 5)}) for _ in range(3)]
        for handle in handles:
            assert consumer(fetch, url, handle)["x"] == expected

    # ---- writes by position -----------------------------------------------------------------------------------------

    @shared
    @given(
        rows=st.integers(0, 60),
        spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12),
        fill=st.booleans(),
    )
    def test_writes_out_of_order_overlapping_and_repeated(
        self, url: str, sink: hsxfer.Sink, consumer: Peer, rows: int, spans: list[tuple[int, int]], fill: bool
    ) -> None:
        """The last write of a row holds; rows never written are named."""
        model, written = np.zeros((rows, 3), "int32"), np.zeros(rows, bool)
        ticket = sink.begin(None, {"x": ((rows, 3), "int32")})
        if fill:
            spans = [(0, rows), *spans]
        for number, span in enumerate(spans):
            start, stop = (min(bound, rows) for bound in sorted(span))
            model[start:stop] = pattern(number, (stop - start, 3), "int32")
            written[start:stop] = True
            ticket.write("x", start, model[start:stop].copy())
        handle = ticket.commit()
        if written.all():
            assert consumer(fetch, url, handle, verify=True)["x"] == told(model)
            return
        with pytest.raises(hsxfer.SampleFailed) as caught:
            consumer(fetch, url, handle)
        missing = np.zeros(rows, bool)
        for start, stop in caught.value.missing["x"]:
            missing[start:stop] = True
        assert (missing == ~written).all()

    def test_a_gap_is_named_for_every_tensor_that_has_one(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        shapes = {"a": ((100, 4), "int8"), "b": ((100, 4), "int8"), "c": ((100, 4), "int8")}
        ticket = sink.begin("k", shapes)
        whole = pattern(1, (100, 4), "int8")
        sink.write_many([(ticket, "a", 0, whole), (ticket, "b", 0, whole[:64]), (ticket, "c", 10, whole[10:20])])
        handle = ticket.commit()
        assert handle == ticket.handle
        with pytest.raises(hsxfer.SampleFailed, match="rows were never written") as caught:
            consumer(fetch, url, handle)
        assert caught.value.missing == {"b": [(64, 100)], "c": [(0, 10), (20, 100)]}
        assert sink.stats()["used_bytes"] == 0

    def test_so_many_gaps_that_they_do_not_fit(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        ticket = sink.begin("k", {f"tensor-{n}": ((1000, 1), "int8") for n in range(64)})
        sink.write_many([(ticket, "tensor-0", row, np.zeros((1, 1), "int8")) for row in range(0, 1000, 2)])
        ticket.commit()
        with pytest.raises(hsxfer.SampleFailed, match="never written"):
            consumer(fetch, url, "k")

    @pytest.mark.parametrize("reason", ["the client went away", 'quote " and \\ and \n', "\u65e5\u672c" * 500, ""])
    def test_abort_says_why(self, url: str, sink: hsxfer.Sink, consumer: Peer, reason: str) -> None:
        ticket = sink.begin(None, {"x": ((10, 2), "int8")})
        ticket.write("x", 0, np.zeros((10, 2), "int8"))
        handle = ticket.abort(reason)
        for _ in range(2):  # a failure is not used up
            with pytest.raises(hsxfer.SampleFailed) as caught:
                consumer(fetch, url, handle)
        assert caught.value.reason.startswith(reason[:90])
        assert sink.stats()["used_bytes"] == 0

    def test_rejected_before_it_began(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        handle = sink.reject("k", {"x": ((10**9, 1000), "float32")}, "longer than the arena")
        with pytest.raises(hsxfer.SampleFailed, match="longer than the arena"):
            consumer(fetch, url, handle)

    def test_bad_writes_are_refused_and_write_nothing(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        ticket = sink.begin("k", {"x": ((10, 4), "int8"), "y": ((10,), "int16")})
        good = np.ones((10, 4), "int8")
        for name, start, rows, message in (
            ("z", 0, good, "no tensor 'z', but x, y"),
            ("x", 1, good, r"\[1, 11\)"),
            ("x", -1, good[:1], r"\[-1, 0\)"),
            ("x", 11, good[:0], r"\[11, 11\)"),
            ("x", 0, good[:, :3], r"int8 \[4\], not int8 \[3\]"),
            ("x", 0, good.view("uint8"), "not uint8"),
            ("y", 0, good, "int16"),
            ("x", 0, good[0, 0], "dimension"),
        ):
            with pytest.raises(hsxfer.ConfigError, match=message):
                sink.write_many([(ticket, "x", 0, good), (ticket, name, start, rows)])
        assert sink.stats()["num_copies"] == 0
        ticket.commit()
        with pytest.raises(hsxfer.ConfigError, match="sealed"):
            ticket.write("x", 0, good)
        assert ticket.commit() == ticket.abort("late") == ticket.handle
        with pytest.raises(hsxfer.SampleFailed) as caught:
            source.get("k")
        assert caught.value.missing == {"x": [(0, 10)], "y": [(0, 10)]}

    def test_bad_samples_are_refused_and_leave_nothing(self, sink: hsxfer.Sink) -> None:
        good = {"x": ((4, 2), "int8")}
        for arguments, options in (
            ((None, {}), {}),
            ((None, {"x": ((), "int8")}), {}),
            ((None, {"x": ((4,), "int9")}), {}),
            ((None, {"x": ((4,), "int8"), "y": ((5,), "int8")}), {}),
            ((None, {"token_ids": ((4,), "int64")}), {}),
            ((None, {"a/b": ((4,), "int8")}), {}),
            ((None, {"x": ((-1,), "int8")}), {}),
            ((None, {"x": ((4, 2**60), "int8")}), {}),
            (("", good), {}),
            (("a\n", good), {}),
            (("k" * 300, good), {}),
            ((7, good), {}),
            ((None, good), {"token_ids": [1, 2, 3]}),
            ((None, good), {"token_ids": [1.5, 2, 3, 4]}),
            ((None, good), {"consumers": 0}),
            ((None, good), {"consumers": True}),
            ((None, good), {"consumers": 70_000}),
            ((None, good), {"rid": 5}),
            ((None, good), {"rid": "r" * 2000}),
            ((None, good), {"meta": {"x": object()}}),
            ((None, good), {"meta": {"x": "y" * (1 << 19)}}),
            ((None, good), {"meta": 3}),
        ):
            with pytest.raises((hsxfer.ConfigError, hsxfer.HandleError)):
                pytest.fail(f"{arguments} {options} gave {sink.begin(*arguments, **options)}")
        assert sink.stats()["num_begun"] == 0

    def test_a_key_in_use(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        first, second = np.zeros((3, 3)), np.ones((3, 3))
        sink.put({"x": first}, "k")
        with pytest.raises(hsxfer.HandleError, match="'k' is in use"):
            sink.put({"x": second}, "k")
        assert consumer(fetch, url, "k")["x"] == told(first)
        sink.put({"x": second}, "k")  # the first is consumed, its key free
        assert consumer(fetch, url, "k")["x"] == told(second)

    def test_a_failed_sample_may_be_tried_again(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        sink.begin("k", {"x": ((3, 3), "float64")}).abort("no luck")
        sink.flush()
        sink.put({"x": np.ones((3, 3))}, "k")
        assert consumer(fetch, url, "k")["x"] == told(np.ones((3, 3)))

    @pytest.mark.parametrize("index", range(6))
    def test_a_fake_engine_in_disorder(self, url: str, consumer: Peer, index: int) -> None:
        shapes = [
            {"tp": 2},
            {"dp": 3, "pp": 2},
            {"tp": 2, "policy": "shard"},
            {"tp": 3, "dp": 2, "policy": "shard"},
            {"tp": 4, "policy": "shard", "chunk_tokens": 16, "batch_tokens": 50},
            {"tp": 2, "policy": "shard", "chunk_tokens": 1},
        ]

        def check(my: Any, url: str, handles: list[hsxfer.Handle]) -> int:
            from hsxfer.testing import check_rows

            return sum(check_rows(sample) for sample in source_of(my, url).prefetch(handles, verify=True))

        sizes = [0, 1, 17, 64, 200, 501] if index != 5 else [0, 1, 17, 100]
        with FakeEngine(url + "?capacity=4MiB", layers=(2, 7), disorder=0.15, seed=index, **shapes[index]) as engine:
            requests = [engine.submit(rows, hidden_states=rows != 64) for rows in sizes]
            engine.run()
            handles = [request.handle for request in requests if request.handle]
            retracted = consumer(check, url, handles)
            assert retracted == sum(request.attempt for request in requests if request.handle and request.rows)

    # ---- what a consumer asks for ------------------------------------------------------------------------------------

    def test_by_handle_key_json_and_dict(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        tensor = tensor_of("bfloat16", (4, 8))
        handle = sink.put({"x": tensor}, "{odd key", consumers=6)
        forms = (handle, handle.to_json(), handle.to_json().encode(), handle.to_dict(), json.loads(handle.to_json()))
        for form in forms:
            assert consumer(fetch, url, form)["x"] == told(tensor)
        with pytest.raises(hsxfer.HandleError):
            consumer(fetch, url, "{odd key")  # taken for JSON
        sink.put({"x": tensor}, "a key \u65e5")
        assert consumer(fetch, url, "a key \u65e5")["x"] == told(tensor)

    def test_names_and_rows(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        a, b = tensor_of("bfloat16", (100, 8)), tensor_of("int64", (100, 2, 3))
        handle = sink.put({"a": a, "b": b}, token_ids=range(100), consumers=100)
        for copy, verify in itertools.product((False, True), (False, "auto", True)):
            options: dict[str, Any] = {"copy": copy, "verify": verify}
            for start, stop in ((0, 100), (10, 20), (99, 100), (50, 50), (None, 7), (93, None)):
                part = source.get(handle, names=["b"], rows=slice(start, stop), **options)
                assert part.keys() == ["b"] == list(part)
                assert ("b" in part, "a" in part, len(part)) == (True, False, 1)
                assert told(part["b"]) == told(b[start:stop])
                assert part.token_ids.tolist() == list(range(100))[start:stop]
                with pytest.raises(KeyError):
                    part["a"]
        with source.get(handle, names=iter(["b", "a"])) as both:
            assert [told(both[name]) for name in both] == [told(b), told(a)]

    def test_bad_arguments_do_not_use_the_sample_up(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        handle = sink.put({"x": tensor_of("complex32", (10, 2))})
        for options in (
            {"names": ["y"]},
            {"names": "x"},
            {"rows": slice(0, 11)},
            {"rows": slice(-1, 5)},
            {"rows": slice(5, 4)},
            {"rows": slice(0, 8, 2)},
            {"rows": slice(0.0, 5)},
            {"rows": 3},
            {"rows": (0, 5)},
            {"framework": "jax"},
            {"framework": "memoryview"},
            {"device": "tpu:0"},
            {"verify": "always"},
        ):
            with pytest.raises(hsxfer.ConfigError):
                source.get(handle, **options)
        elsewhere = handle.to_dict() | {"store": "shm://elsewhere"}
        for other in (elsewhere, elsewhere | {"instance": "other"}, {}, None, 3, b"", "", "a\n", "{"):
            with pytest.raises(hsxfer.HandleError):
                source.get(other, timeout_s=0)
        source.get(handle).release()

    @pytest.mark.parametrize(
        "lie",
        [
            {"tensors": {"x": {"dtype": "float32", "shape": [10, 2]}}},
            {"tensors": {"x": {"dtype": "int16", "shape": [10, 4]}}},
            {"tensors": {"y": {"dtype": "int16", "shape": [10, 2]}}},
            {"rows": [5, 15]},
            {"consumers": 9},
            {"rid": "other"},
            {"token_hash": "0" * 16},
            {"model": "other"},
            {"layers": None},
        ],
        ids=lambda lie: next(iter(lie)),
    )
    def test_a_handle_that_contradicts_the_arena(self, sink: hsxfer.Sink, source: hsxfer.Source, lie: Any) -> None:
        handle = sink.put({"x": pattern(1, (10, 2), "int16")})
        with pytest.raises(hsxfer.HandleError, match=next(iter(lie))):
            source.get(handle.to_dict() | lie)
        source.get(handle).release()

    def test_acknowledgements(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        handle = sink.put({"x": pattern(1, (10, 2))}, consumers=3)
        for ack in (False, True, False, True, False, True):
            consumer(fetch, url, handle, ack=ack)
        wait_for(lambda: sink.stats()["used_bytes"] == 0, "the space is back", LIVELY_S)
        for form in (handle, handle.key):
            with pytest.raises(hsxfer.SampleLost) as caught:
                consumer(fetch, url, form)
            assert caught.value.reason == "consumed"

    def test_copies_are_the_callers_own(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        for framework in ("torch", "numpy"):
            tensor = tensor_of("float32", (10, 2))
            handle = sink.put({"x": tensor}, token_ids=range(10))
            with source.get(handle, copy=True, framework=framework) as sample:
                mine = sample["x"]
                ids = sample.token_ids
            wait_for(lambda: sink.stats()["used_bytes"] == 0, "the space is back while the copy lives", LIVELY_S)
            assert told(mine) == told(tensor)
            mine[:] = 0
            ids[:] = 0

    def test_numpy_views_are_read_only(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        with source.get(sink.put({"x": pattern(1, (10, 2))}), framework="numpy") as sample:
            with pytest.raises(ValueError, match="read-only"):
                sample["x"][0] = 0

    def test_two_looks_at_a_tensor_are_one_tensor(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        with source.get(sink.put({"x": tensor_of("int8", (10, 2))})) as sample:
            assert sample["x"] is sample["x"]

    def test_a_released_sample_is_gone(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        sample = source.get(sink.put({"x": pattern(1, (10, 2))}))
        sample.release()
        sample.release()
        for look in (lambda: sample["x"], lambda: sample.token_ids):
            with pytest.raises(hsxfer.SampleLost, match="released"):
                look()

    def test_check(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        rows = torch.ones(10, 4, dtype=torch.bfloat16)
        rows[3, 1], rows[4, 2], rows[7] = float("nan"), float("-inf"), 0
        handle = sink.put({"x": rows, "n": torch.zeros(10, 1, dtype=torch.int8)}, token_ids=range(10), consumers=2)
        for framework in ("torch", "numpy"):
            with source.get(handle, framework=framework) as sample:
                sample.check(token_ids=range(10), layers=[2, 5], convention="c", model="m")
                for claim, message in (
                    ({"token_ids": range(1, 11)}, "token hash"),
                    ({"layers": [2, 6]}, r"layers \(2, 5\), not \(2, 6\)"),
                    ({"convention": "d"}, "convention 'c', not 'd'"),
                    ({"model": "n"}, "model 'm', not 'n'"),
                    ({"finite": True}, r"rows \[3, 4\] of 'x'"),
                    ({"nonzero": True}, r"rows \[7\] of 'x'"),
                ):
                    with pytest.raises(hsxfer.IntegrityError, match=message):
                        sample.check(**claim)

    @pytest.mark.parametrize("framework", ["torch", "numpy"])
    def test_check_takes_good_rows_for_good(self, sink: hsxfer.Sink, source: hsxfer.Source, framework: str) -> None:
        for rows in (
            torch.full((4, 2), 1e300, dtype=torch.float64),
            torch.full((4, 2), 1e-300, dtype=torch.float64),
            torch.full((4, 2), 2.0**-24, dtype=torch.float16),
            torch.full((4, 2), 448.0).to(torch.float8_e4m3fn),
            torch.ones(4),
            torch.ones(0, 8),
            torch.ones(4, 0),
        ):
            with source.get(sink.put({"x": rows}), framework=framework) as sample:
                sample.check(finite=True, nonzero=True)

    def test_meta_and_token_ids(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        meta = {"n": [1, 2.5, None, True], "nested": {"\u65e5": "\U0001f600"}, "big": 2**70}
        got = consumer(fetch, url, sink.put({"x": pattern(1, (3, 2))}, token_ids=[-1, 0, 2**62], meta=meta))
        assert got["meta"] == meta
        assert got["token_ids"] == [-1, 0, 2**62]
        got = consumer(fetch, url, sink.put({"x": pattern(1, (3, 2))}))
        assert (got["meta"], got["token_ids"]) == ({}, None)

    # ---- prefetch ------------------------------------------------------------------------------------------------------

    def test_prefetch_keeps_the_order(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        handles = [sink.put({"x": np.full((5, 2), n)}) for n in range(20)]
        for depth in (1, 3, 50):
            got = [int(sample["x"][0, 0]) for sample in source.prefetch(handles, depth=depth, ack=False)]
            assert got == list(range(20))

    def test_prefetch_raises_an_error_at_its_sample_and_ends(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        handles = [sink.put({"x": np.full((5, 2), n)}) for n in range(5)]
        handles[3] = sink.reject("bad", {"x": ((1,), "int8")}, "on purpose")
        samples = source.prefetch(handles)
        assert [int(next(samples)["x"][0, 0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(hsxfer.SampleFailed, match="on purpose"):
            next(samples)
        with pytest.raises(StopIteration):
            next(samples)

    def test_prefetch_stopped_early_gives_everything_back(
        self, sink: hsxfer.Sink, source: hsxfer.Source, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also the one that is still being fetched. By a release: the garbage collector may come late."""
        handles = [sink.put({"x": np.full((500, 20), n)}) for n in range(10)]
        kept: list[hsxfer.Sample] = []
        get, under_way, go_on = source.get, threading.Event(), threading.Event()

        def get_and_keep(handle: hsxfer.Handle, **options: Any) -> hsxfer.Sample:
            if len(kept) == 7:
                under_way.set()
                assert go_on.wait(LIVELY_S)
            kept.append(get(handle, **options))
            return kept[-1]

        def num_left() -> float:
            return sink.stats()["used_bytes"] / (500 * 20 * 8)

        monkeypatch.setattr(source, "get", get_and_keep)
        for number, sample in enumerate(source.prefetch(handles, depth=3)):
            sample.release()
            if number == 4:
                assert under_way.wait(LIVELY_S)
                assert num_left() == 5
                break
        wait_for(lambda: num_left() == 3, "the two fetched ahead are back", LIVELY_S)
        go_on.set()
        wait_for(lambda: len(kept) == 8 and num_left() == 2, "the one under way is back", LIVELY_S)
        for handle in handles[8:]:
            get(handle).release()  # not fetched ahead that far
        assert num_left() == 0

    def test_prefetch_hands_on_what_it_has_while_the_next_handle_is_not_known_yet(
        self, sink: hsxfer.Sink, source: hsxfer.Source
    ) -> None:
        """As when the handles are replies of a server that waits for this trainer."""
        done = threading.Event()

        def replies() -> Iterator[hsxfer.Handle]:
            for n in range(4):
                yield sink.put({"x": np.full((5, 2), n)})
                assert done.wait(LIVELY_S), "the next request needs the last sample"
                done.clear()

        got = []
        for sample in source.prefetch(replies(), depth=2):
            got.append(int(sample["x"][0, 0]))
            done.set()
        assert got == [0, 1, 2, 3]

    def test_prefetch_says_at_once_what_is_wrong(self, source: hsxfer.Source) -> None:
        with pytest.raises(hsxfer.ConfigError, match="depth 0"):
            source.prefetch([], depth=0)
        source.close()
        with pytest.raises(hsxfer.TransportUnavailable, match="closed"):
            source.prefetch([])

    # ---- ranks and processes -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("count", [2, 3])
    def test_shards_are_joined(self, url: str, consumer: Peer, count: int) -> None:
        whole = tensor_of("bfloat16", (101, 6))
        ranks = [hsxfer.Rank(tp=(n, count)) for n in range(count)]
        sinks = [hsxfer.open_sink(url + "?capacity=1MiB", rank, "shard", instance="i") for rank in ranks]
        handles = set()
        for sink in sinks:
            ticket = sink.begin("k", {"x": ((101, 6), "bfloat16")}, token_ids=range(101))
            for start, stop in ((60, 101), (0, 33), (20, 60), (0, 1)):
                ticket.write("x", start, whole[start:stop])
            handles.add(ticket.commit())
        (handle,) = handles
        assert len(handle.ranks) == count
        for options in ({"ack": False}, {"ack": False, "rows": slice(30, 64)}, {"verify": True}):
            got = consumer(fetch, url, handle, **options)
            rows = options.get("rows", slice(0, 101))
            assert got["x"] == told(whole[rows])
            assert got["token_ids"] == list(range(101))[rows]
        for sink in sinks:
            wait_for(lambda sink=sink: sink.stats()["used_bytes"] == 0, "every rank's part is acknowledged", LIVELY_S)
            sink.close()

    def test_a_missing_rank_is_named(self, url: str, consumer: Peer) -> None:
        with hsxfer.open_sink(url + "?capacity=1MiB", hsxfer.Rank(tp=(0, 2)), "shard", instance="i") as sink:
            handle = sink.put({"x": pattern(1, (10, 2))})
            started = time.monotonic()
            with pytest.raises(hsxfer.SampleLost, match="dp0-pp0-tp1") as caught:
                consumer(fetch, url, handle)
            assert caught.value.reason == "missing rank"
            assert time.monotonic() - started < LIVELY_S
            with pytest.raises(hsxfer.TransferTimeout):
                consumer(fetch, url, handle, timeout_s=0.1)
            assert sink.stats()["num_unread"] == 1, "half a sample is not acknowledged"

    def test_several_sending_ranks_need_one_instance(self, url: str) -> None:
        with pytest.raises(hsxfer.ConfigError, match="instance"):
            hsxfer.open_sink(url, hsxfer.Rank(tp=(0, 2)), "shard")

    def test_data_parallel_ranks_and_servers_share_a_store(self, url: str, consumer: Peer) -> None:
        sinks = [hsxfer.open_sink(url + "?capacity=1MiB", hsxfer.Rank(dp=(n, 2))) for n in (0, 1)]
        sinks.append(hsxfer.open_sink(url + "?capacity=1MiB"))
        for number, sink in enumerate(sinks):
            sink.put({"x": np.full((3, 3), number)}, f"k{number}")
        for number in (2, 0, 1):
            assert consumer(fetch, url, f"k{number}")["x"] == told(np.full((3, 3), number))
        for sink in sinks:
            sink.close()

    def test_ranks_that_do_not_send_do_nothing_and_know_the_handle(self, url: str) -> None:
        leader, follower, stage0 = (
            hsxfer.open_sink(url + "?capacity=1MiB", hsxfer.Rank(tp=tp, pp=pp), instance="i", model="m")
            for tp, pp in (((0, 2), (1, 2)), ((1, 2), (1, 2)), ((0, 2), (0, 2)))
        )
        handles = {sink.put({"x": pattern(1, (10, 2))}, token_ids=range(10)) for sink in (leader, follower, stage0)}
        assert len(handles) == 1
        assert [sink.sends for sink in (leader, follower, stage0)] == [True, False, False]
        for sink in (follower, stage0):
            ticket = sink.begin("k", {"x": ((10, 2), "uint8")})
            ticket.write("x", 0, object())  # not even looked at
            ticket.commit()
            sink.flush()
            assert {name: value for name, value in sink.stats().items() if value} == {"num_puts": 1}
            sink.close()
        leader.close()

    def test_consumers_in_several_processes(self, url: str, sink: hsxfer.Sink, consumer: Peer, new_peer: Any) -> None:
        peers = [consumer, new_peer(), new_peer()]
        whole = pattern(1, (100, 10), "int16")
        handles = [sink.put({"x": whole}, consumers=len(peers)) for _ in range(10)]

        def all_of_them(my: Any, url: str, handles: list[hsxfer.Handle]) -> list[Any]:
            return [fetch(my, url, handle, framework="numpy")["x"] for handle in handles]

        for peer in peers:
            peer.start(all_of_them, url, handles)
        for peer in peers:
            assert peer.result() == [told(whole)] * 10
        wait_for(lambda: sink.stats()["used_bytes"] == 0, "all have read all", LIVELY_S)

    def test_one_of_several_takes_each_sample(self, url: str, sink: hsxfer.Sink, consumer: Peer, new_peer: Any) -> None:
        peers = [consumer, new_peer()]
        handles = [sink.put({"x": pattern(n, (10, 4))}) for n in range(60)]

        def take(my: Any, url: str, handles: list[hsxfer.Handle]) -> list[tuple[str, Any]]:
            taken = []
            for handle in handles:
                try:
                    taken.append((handle.key, fetch(my, url, handle, framework="numpy")["x"]))
                except hsxfer.SampleLost as error:
                    if error.reason != "consumed":
                        raise
            return taken

        for peer in peers:
            peer.start(take, url, handles)
        taken = [entry for peer in peers for entry in peer.result()]
        assert sorted(taken) == sorted((handle.key, told(pattern(n, (10, 4)))) for n, handle in enumerate(handles))

    def test_threads(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        def worker(number: int, failures: list[str]) -> None:
            for n in range(40):
                rows = pattern(1000 * number + n, (20, 8), "int32")
                handle = sink.put({"x": rows})
                with source.get(handle, framework="numpy", verify=True) as sample:
                    if not (sample["x"] == rows).all():
                        failures.append(f"{number}.{n}")
            failures.append("done")

        failures: list[str] = []
        threads = [threading.Thread(target=worker, args=(number, failures)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == ["done"] * 4

    # ---- waiting ---------------------------------------------------------------------------------------------------------

    def test_a_consumer_may_come_first(self, url: str, consumer: Peer) -> None:
        rows = pattern(1, (10, 2))
        consumer(source_of_only, url)
        consumer.start(fetch, url, "k", timeout_s=30)
        with hsxfer.open_sink(url + "?capacity=1MiB") as sink:
            sink.put({"x": rows}, "k")
            assert consumer.result()["x"] == told(rows)

    def test_get_waits_for_the_last_row(self, url: str, sink: hsxfer.Sink, consumer: Peer) -> None:
        rows = pattern(1, (10, 2))
        ticket = sink.begin("k", {"x": ((10, 2), "uint8")})
        ticket.write("x", 0, rows[:5])
        for form in ("k", ticket.handle):
            with pytest.raises(hsxfer.TransferTimeout, match=r"0\.05 s"):
                consumer(fetch, url, form, timeout_s=0.05)
        consumer.start(fetch, url, ticket.handle)
        ticket.write("x", 5, rows[5:])
        ticket.commit()
        assert consumer.result()["x"] == told(rows)

    def test_a_timeout_is_kept(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        for timeout_s in (0, 0.3):
            started = time.monotonic()
            with pytest.raises(hsxfer.TransferTimeout):
                source.get("never", timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - started < timeout_s + LIVELY_S

    def test_closing_a_source_ends_its_waits(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                source.get("never", timeout_s=60)
            except hsxfer.TransportUnavailable as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: sink.stats()["readers"] == 1, "the source looks", LIVELY_S)
        source.close()
        thread.join(LIVELY_S)
        assert "closed" in str(caught[0])

    def test_what_is_closed_says_so(self, sink: hsxfer.Sink, source: hsxfer.Source) -> None:
        ticket = sink.begin("k", {"x": ((10, 2), "uint8")})
        sink.close()
        sink.close()
        ticket.commit()
        for call in (sink.stats, sink.flush, lambda: sink.put({"x": b"1"}), lambda: ticket.write("x", 0, bytes(2))):
            with pytest.raises((hsxfer.TransportUnavailable, hsxfer.ConfigError), match=r"closed|sealed"):
                call()
        source.close()
        source.close()
        with pytest.raises(hsxfer.TransportUnavailable, match="closed"):
            source.get("k")


def source_of_only(my: Any, url: str) -> None:
    """In the peer: opens the source and says nothing."""
    source_of(my, url)

"""An engine without a model, to test a trainer with: every row says which request, position and layer it belongs to.

    with FakeEngine("shm://my-test", tp=2, layers=(2, 5), disorder=0.1) as engine:
        request = engine.submit(rows=1000)
        engine.run()
        with hsxfer.open_source("shm://my-test").get(request.handle) as sample:
            check_rows(sample)  # AssertionError naming the first row that is not what it should be

Needs torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import torch

from .errors import ConfigError, StoreFull, TransferTimeout
from .handle import Handle
from .ranks import Rank
from .sample import Sample
from .sink import Sink, open_sink
from .ticket import Ticket

LAST = 511  # the layer code of `last_hidden_states`
MAX_DISORDER = 2  # retractions of one request that `disorder` makes: else a long one would never end
_FIELDS = {"attempt": 1, "request": 6, "position": 8, "layer": 3}  # octal digits of each
_NUM_DIGITS = sum(_FIELDS.values())


def coded_rows(
    request: int, start: int, stop: int, *, layers: Sequence[int], hidden_size: int, dtype: str, attempt: int = 0
) -> torch.Tensor:
    """Rows `[start, stop)` of a request, `[stop - start, len(layers) * hidden_size]`.

    Each layer's columns repeat the octal digits of (attempt, request, position, layer), shifted by one per repetition,
    as 1 to 8: numbers that every floating-point dtype holds exactly, down to float8_e5m2, and never a row of zeros.
    """
    if hidden_size < _NUM_DIGITS:
        raise ConfigError(f"hidden_size {hidden_size} is less than the {_NUM_DIGITS} columns that a row's code needs")
    positions = torch.arange(start, stop)
    columns = torch.arange(hidden_size)
    blocks = []
    for layer in layers:
        values = {"attempt": attempt, "request": request, "position": positions, "layer": layer}
        digits = [
            torch.as_tensor(values[name]).expand(len(positions)) >> 3 * digit & 7
            for name, count in _FIELDS.items()
            for digit in range(count)
        ]
        code = torch.stack(digits, 1)[:, columns % _NUM_DIGITS]
        blocks.append((code + columns // _NUM_DIGITS) % 8 + 1)
    return torch.cat(blocks, 1).float().to(getattr(torch, dtype))


def token_ids_of(request: int, rows: int) -> list[int]:
    return [(request * 7919 + position * 31) % 50257 for position in range(rows)]


def check_rows(sample: Sample) -> int:
    """Holds every row and token id of a `FakeEngine`'s sample to what it must be, bit for bit; returns how often the request was
    retracted before. Raises `AssertionError` naming the first wrong row and what lies there instead."""
    fake = sample.meta["fake"]
    first = sample.handle.rows[0] + sample.rows[0]
    stop = sample.handle.rows[0] + sample.rows[1]
    attempt = None
    for name in sample:
        layers, size, dtype = fake["layers"][name], fake["hidden_size"], sample.handle.tensors[name].dtype
        num_rows = sample[name].shape[0]
        assert num_rows == stop - first, f"{num_rows} rows of {name!r}, not {stop - first}"
        if num_rows == 0:
            continue
        found = _raw(sample[name])
        if attempt is None:
            attempt = _decode(found[0], dtype)["attempt"]
        expected = _raw(
            coded_rows(fake["request"], first, stop, layers=layers, hidden_size=size, dtype=dtype, attempt=attempt)
        )
        wrong = (found != expected).any(1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            width = expected.shape[1] // len(layers)
            block = int((found[row] != expected[row]).nonzero()[0]) // width
            here = slice(block * width, (block + 1) * width)
            raise AssertionError(
                f"sample {sample.handle.key!r}: row {first + row} of {name!r}, layer {layers[block]}: expected "
                f"{_decode(expected[row, here], dtype)}, found {_decode(found[row, here], dtype)}; {len(wrong)} rows are wrong"
            )
    if sample.token_ids is not None:
        ids = [int(token) for token in sample.token_ids]
        expected_ids = token_ids_of(fake["request"], stop)[first:]
        assert ids == expected_ids, f"sample {sample.handle.key!r}: token ids {ids[:8]}..., not {expected_ids[:8]}..."
    return attempt or 0


def _raw(tensor: Any) -> torch.Tensor:
    """Bytes as `[rows, row_bytes]`, from any framework."""
    rows = tensor.shape[0]
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().view(torch.uint8).reshape(rows, -1)
    data = bytearray(memoryview(tensor.view("uint8") if hasattr(tensor, "view") else tensor).tobytes())
    return torch.frombuffer(data, dtype=torch.uint8).reshape(rows, -1)


def _decode(raw: torch.Tensor, dtype: str) -> dict[str, int]:
    digits = raw.contiguous().view(getattr(torch, dtype))[:_NUM_DIGITS].float().nan_to_num(0).round().int().tolist()
    if not all(1 <= digit <= 8 for digit in digits):
        return {"attempt": 0, "no code": digits[0]}
    decoded, at = {}, 0
    for name, count in _FIELDS.items():
        decoded[name] = sum((digits[at + digit] - 1) << 3 * digit for digit in range(count))
        at += count
    return decoded


@dataclass(eq=False)
class FakeRequest:
    """`state`: "waiting", "running", "finished", "aborted" or "rejected" (longer than the arena)."""

    number: int
    rows: int
    dp: int
    hidden_states: bool
    consumers: int
    state: str = "waiting"
    handle: Handle | None = None  # from the moment that it runs
    attempt: int = 0  # how often it was retracted
    tickets: list[tuple[Sink, Ticket]] = field(default_factory=list, repr=False)
    chunks: list[tuple[int, int]] = field(default_factory=list, repr=False)

    @property
    def rid(self) -> str:
        return f"fake-{self.number}"


class FakeEngine:
    """Continuous batching with chunked prefill over any shape of ranks, one `Sink` each, in this process.

    `layers`: auxiliary layers, side by side in `hidden_states`; with none it holds the last layer's states, and there is
    no other tensor. `disorder`: the chance per forward that a running request is retracted and starts again; if it is not
    0, chunks also come shuffled and repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        tp: int = 1,
        dp: int = 1,
        pp: int = 1,
        policy: str = "leader",
        layers: Sequence[int] = (),
        hidden_size: int = 32,
        dtype: str = "bfloat16",
        chunk_tokens: int = 64,
        batch_tokens: int = 160,
        disorder: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._names = (
            {"hidden_states": list(layers), "last_hidden_states": [LAST]} if layers else {"hidden_states": [LAST]}
        )
        self._hidden_size, self._dtype = hidden_size, dtype
        self._chunk_tokens, self._batch_tokens = chunk_tokens, batch_tokens
        self._disorder, self._random = disorder, random.Random(seed)
        self._num_requests = 0
        self._queues: list[list[FakeRequest]] = [[] for _ in range(dp)]
        instance = f"fake-{random.SystemRandom().getrandbits(64):x}"
        self.sinks: dict[tuple[int, int, int], Sink] = {
            (d, p, t): open_sink(
                url,
                Rank(tp=(t, tp), dp=(d, dp), pp=(p, pp)),
                policy,
                instance=instance,
                model="fake",
                layers=layers or None,
            )
            for d in range(dp)
            for p in range(pp)
            for t in range(tp)
        }

    def submit(self, rows: int, *, hidden_states: bool = True, consumers: int = 1) -> FakeRequest:
        """A request of `rows` tokens; data-parallel ranks take turns."""
        number, dp = self._num_requests, self._num_requests % len(self._queues)
        self._num_requests += 1
        request = FakeRequest(number, rows, dp, hidden_states, consumers)
        self._queues[dp].append(request)
        return request

    def step(self) -> list[FakeRequest]:
        """One forward on every data-parallel rank; returns the requests that ended with it. Never waits for space."""
        return [request for dp, queue in enumerate(self._queues) for request in self._forward(dp, queue)]

    def run(self, timeout_s: float = 30.0) -> None:
        """Steps until every request has ended, and its bytes have moved. Raises `TransferTimeout` if no space comes free."""
        deadline = monotonic() + timeout_s
        while any(self._queues):
            if not self.step():
                if monotonic() > deadline:
                    raise TransferTimeout(f"requests wait for space after {timeout_s:g} s")
                if all(request.state == "waiting" for queue in self._queues for request in queue):
                    sleep(0.001)
        self.flush()

    def retract(self, request: FakeRequest) -> None:
        """As when an engine is short of cache: the request starts again from row 0, in the ticket that it has."""
        if request.state == "running":
            request.attempt += 1
            request.chunks = self._chunks(request)

    def abort(self, request: FakeRequest, reason: str = "the client went away") -> None:
        if request in self._queues[request.dp]:
            self._queues[request.dp].remove(request)
            request.state = "aborted"
            for _, ticket in request.tickets:
                ticket.abort(reason)

    def flush(self) -> None:
        for sink in self.sinks.values():
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks.values():
            sink.close()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _forward(self, dp: int, queue: list[FakeRequest]) -> list[FakeRequest]:
        running = [request for request in queue if request.state == "running" and request.attempt < MAX_DISORDER]
        if running and self._random.random() < self._disorder:
            self.retract(self._random.choice(running))
        batch: list[tuple[FakeRequest, int, int]] = []
        room = self._batch_tokens
        for request in queue:
            if room == 0:
                break
            if request.state == "waiting" and not self._begin(request):
                continue
            if request.chunks:
                start, stop = request.chunks.pop(0)
                if stop - start > room:  # the batch splits the request's chunk
                    request.chunks.insert(0, (start + room, stop))
                    stop = start + room
                room -= stop - start
                batch.append((request, start, stop))
        self._send(dp, batch)
        ended = [request for request in queue if request.state == "rejected" or self._complete(request)]
        for request in ended:
            queue.remove(request)
            if request.state == "running":
                request.state = "finished"
                for _, ticket in request.tickets:
                    ticket.commit()
        return ended

    def _complete(self, request: FakeRequest) -> bool:
        return request.state == "running" and not request.chunks

    def _begin(self, request: FakeRequest) -> bool:
        if request.hidden_states:
            shapes = {
                name: ((request.rows, len(layers) * self._hidden_size), self._dtype)
                for name, layers in self._names.items()
            }
            told: dict[str, Any] = {
                "rid": request.rid,
                "token_ids": token_ids_of(request.number, request.rows),
                "meta": {"fake": {"request": request.number, "hidden_size": self._hidden_size, "layers": self._names}},
                "consumers": request.consumers,
            }
            key = f"{request.rid}-{request.number}"
            sinks = [sink for (dp, _, _), sink in self.sinks.items() if dp == request.dp]
            sinks.sort(key=lambda sink: not sink.sends)
            try:
                request.tickets = [(sinks[0], sinks[0].begin(key, shapes, **told, block_s=0))]
            except StoreFull as error:
                if error.needed_bytes <= error.capacity_bytes:
                    return False
                request.handle = [sink.reject(key, shapes, str(error), **told) for sink in sinks][-1]
                request.state = "rejected"
                return False
            # The other ranks' arenas hold the same samples, so what is short there has been acknowledged here and comes free.
            request.tickets += [(sink, sink.begin(key, shapes, **told)) for sink in sinks[1:]]
            request.handle = request.tickets[0][1].handle
        request.state = "running"
        request.chunks = self._chunks(request)
        return True

    def _chunks(self, request: FakeRequest) -> list[tuple[int, int]]:
        size = self._chunk_tokens
        chunks = [(start, min(start + size, request.rows)) for start in range(0, request.rows, size)]
        if self._disorder and chunks:
            chunks += self._random.choices(chunks, k=len(chunks) // 3)
            self._random.shuffle(chunks)
        return chunks

    def _send(self, dp: int, batch: list[tuple[FakeRequest, int, int]]) -> None:
        """The forward's output, rows of all requests below each other as engines have it, and each rank's writes from it."""
        writes: dict[Sink, list[tuple[Ticket, str, int, torch.Tensor]]] = {}
        for name, layers in self._names.items():
            rows = [
                coded_rows(
                    request.number,
                    start,
                    stop,
                    layers=layers,
                    hidden_size=self._hidden_size,
                    dtype=self._dtype,
                    attempt=request.attempt % 8,
                ).view(torch.uint8)  # torch cannot concatenate every dtype
                for request, start, stop in batch
            ]
            if not rows:
                continue
            output, at = torch.cat(rows).view(getattr(torch, self._dtype)), 0
            for request, start, stop in batch:
                for sink, ticket in request.tickets:
                    writes.setdefault(sink, []).append((ticket, name, start, output[at : at + stop - start]))
                at += stop - start
        for sink, its_writes in writes.items():
            sink.write_many(its_writes)

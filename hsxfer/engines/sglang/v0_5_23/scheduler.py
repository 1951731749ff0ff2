"""Hooks of a scheduler's process: one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..admission import Admission
from ..guard import attempt, nothing, refuse, survive
from ..plugin import NO_HANDLE, Piece, Plugin
from ..replies import encode
from ..samples import Sample
from ..setup import Hook, open_plugin, require_applied
from .messages import Messages, number_of

# This process's rank, from the end of its scheduler's own initialisation on.
_plugin: Plugin | None = None
_admission: Admission | None = None
_typed_messages = False


def on_scheduler_start(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.__init__`: once all of sglang is up, and before it says so, open this rank's sink."""
    original(scheduler, *args, **kwargs)
    require_applied(SCHEDULER_HOOKS)
    attempt(lambda error: refuse(f"cannot attach to the scheduler: {error}"), _attach, scheduler)


def _attach(scheduler: Any) -> None:
    global _plugin, _admission, _typed_messages
    from sglang.srt.managers import io_struct
    from sglang.srt.runtime_context import get_parallel, get_serving

    parallel = get_parallel()
    if parallel.attn_dp_enabled:
        dp = (parallel.attn_dp_rank, parallel.attn_dp_size)
    else:
        dp = (parallel.dp_rank or 0, max(1, parallel.num_dp_ranks))
    config = scheduler.model_config
    plugin = open_plugin(
        tp=(parallel.attn_tp_rank, parallel.attn_tp_size),
        dp=dp,
        pp=(0, 1),
        width=config.hidden_size,
        dtype=str(config.dtype).removeprefix("torch."),
        row_bytes=config.hidden_size * config.dtype.itemsize,
        model=get_serving().served_model_name,
    )
    if plugin.sends:
        options = plugin.sink.options
        _admission = Admission(plugin, Messages(), options.block_s if options.on_full == "block" else 0.0)
    _typed_messages = not io_struct._USE_PICKLE_IPC
    _plugin = plugin


def on_pull(original: Callable[..., Any], receiver: Any) -> Any:
    """Around `SchedulerRequestReceiver._pull_raw_reqs`: between the socket and the broadcast to the other ranks."""
    received = original(receiver)
    plugin, admission = _plugin, _admission
    if plugin is None:
        return received
    survive("keep its books", nothing, plugin.poll)
    if received is None or admission is None or not (received or admission.waiting):
        return received
    with plugin.counters.timed():
        return admission.receive(received)


def on_create_request(original: Callable[..., Any], scheduler: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler._create_generation_req`: the engine's request gets its sample, on the rank that sends."""
    request = original(scheduler, message, *args, **kwargs)
    plugin = _plugin
    if plugin is not None and plugin.sends and message.return_hidden_states:

        def claim() -> None:
            number = number_of(message)
            request.hsxfer = None if number is None else plugin.claim(number, message.rid)

        survive("find a request's sample", nothing, claim)
    return request


def _sample(request: Any) -> Sample | None:
    sample: Sample | None = getattr(request, "hsxfer", None)
    return sample


def on_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `TpModelWorker.forward_batch_generation`, on the forward stream, before anything is copied to the host.

    The tensor is removed from the result on every rank, so that none copies or converts it.
    """
    plugin = _plugin
    if plugin is None or batch is None or not batch.return_hidden_states:
        return original(worker, batch, *args, **kwargs)
    # Read now: under overlap a request is a chunk ahead by the time its result is looked at.
    pieces, num_rows = survive("place a batch's rows", _no_pieces, _pieces, plugin, batch) if plugin.sends else ([], 0)
    result = original(worker, batch, *args, **kwargs)

    def give_up(error: Exception) -> None:
        for piece in pieces:
            plugin.fail(piece.sample, f"the engine's result was not as hsxfer knows it: {error}")

    survive("take a batch's hidden states", give_up, _take, plugin, result, pieces, num_rows)
    return result


def _take(plugin: Plugin, result: Any, pieces: list[Piece], num_rows: int) -> None:
    output = result.logits_output
    hidden = getattr(output, "hidden_states", None)
    if hidden is not None:
        output.hidden_states = None
    if pieces:
        with plugin.counters.timed():
            # A graph's output is overwritten by its next replay; holding a reference does not protect it.
            plugin.take(pieces, hidden, num_rows, snapshot=bool(result.can_run_cuda_graph))


def _no_pieces(error: Exception) -> tuple[list[Piece], int]:
    return [], 0


def _pieces(plugin: Plugin, batch: Any) -> tuple[list[Piece], int]:
    """Where the rows of each request that has an open sample lie in the batch, and how many rows it has in all."""
    if not batch.forward_mode.is_extend():
        return [], 0
    pieces = []
    offset = 0
    for request, start, rows in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        sample = _sample(request)
        if sample is not None and sample.open:
            # An aborted request is prefilled with one token that is not its own.
            if request.to_finish is not None or len(request.origin_input_ids) != sample.rows:
                plugin.fail(sample, _why_not(sample, request))
            else:
                pieces.append(Piece(sample, offset, start, rows))
        offset += rows
    return pieces, offset


def _why_not(sample: Sample, request: Any) -> str:
    if request.to_finish is not None:
        return _ended(request.to_finish)
    return f"the engine changed the prompt of {sample.rows} tokens to {len(request.origin_input_ids)}"


def _ended(reason: Any) -> str:
    return f"the request ended before its prompt was processed: {getattr(reason, 'message', None) or reason}"


def on_prefill_result(original: Callable[..., Any], processor: Any, batch: Any, result: Any) -> Any:
    """Around `SchedulerBatchResultProcessor.process_batch_result_prefill`: prompts that are through."""
    plugin = _plugin
    if plugin is not None and plugin.sends and batch.return_hidden_states:
        with plugin.counters.timed():
            survive("commit samples", nothing, _commit, plugin, batch)
    return original(processor, batch, result)


def _commit(plugin: Plugin, batch: Any) -> None:
    for request, start, rows in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        sample = _sample(request)
        if sample is None or not sample.open:
            continue
        if request.is_retracted or request.inflight_middle_chunks > 0:
            continue  # to be computed again; not the last chunk
        if request.discard_output_reason is not None:
            plugin.fail(sample, request.discard_output_reason.message or "the engine discarded the forward pass")
        elif not request.finished() and start + rows >= sample.rows:
            plugin.commit(sample)


def on_stream(original: Callable[..., Any], accumulator: Any, *, req: Any) -> Any:
    """Around `_GenerationStreamAccumulator.accept`: the handle in place of the floats, also with `max_new_tokens=0`.

    Here and not in `req.hidden_states`, which sglang cuts to the number of generated tokens.
    """
    num_before = len(accumulator.rids)
    original(accumulator, req=req)
    plugin = _plugin
    if plugin is not None and plugin.sends and req.return_hidden_states and len(accumulator.rids) > num_before:
        with plugin.counters.timed():
            handle = survive("answer with a handle", lambda _: NO_HANDLE, _handle, plugin, req)
            accumulator.output_hidden_states[-1] = [encode(handle) if _typed_messages else handle]


def _handle(plugin: Plugin, request: Any) -> dict[str, Any]:
    sample = _sample(request)
    if sample is None or sample.handle is None:
        return NO_HANDLE
    if sample.open and request.finished():
        plugin.fail(sample, _ended(request.finished_reason))
    return sample.handle


_COMPONENTS = "sglang.srt.managers.scheduler_components"

SCHEDULER_HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler.__init__", on_scheduler_start),
    Hook(f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs", on_pull),
    Hook("sglang.srt.managers.scheduler.Scheduler._create_generation_req", on_create_request, ("recv_req",)),
    Hook("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", on_forward, ("batch",)),
    Hook(
        f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
        on_prefill_result,
        ("batch", "result"),
    ),
    Hook(f"{_COMPONENTS}.output_streamer._GenerationStreamAccumulator.accept", on_stream, ("req",)),
)

"""Hooks of the process that starts the server, takes its requests and gives its replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..guard import nothing, refuse, survive
from ..replies import decode
from ..setup import Hook, name_launch, require_applied


def on_resolve_arguments(original: Callable[..., Any], arguments: Any) -> Any:
    """Around `ServerArgs.resolve_once`: switch on what a request for hidden states is refused without."""
    if not getattr(arguments, "_resolution_finished", False):
        arguments.enable_return_hidden_states = True
        arguments.return_hidden_states_mode = "full"
    return original(arguments)


def on_launch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around `Engine._launch_scheduler_processes`: the last moment to refuse before a model is loaded."""
    from sglang.srt.runtime_context import get_parallel

    require_applied(LAUNCHER_HOOKS)
    for unsupported in _unsupported():
        refuse(
            f"{unsupported} is not supported with sglang 0.5.23; unset HSXFER_SINK to run without hidden-state transfer"
        )
    name_launch(get_parallel().nnodes)
    return original(*args, **kwargs)


def _unsupported() -> Iterator[str]:
    """What was asked of this server that would give no, or wrong, hidden states."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import io_struct
    from sglang.srt.runtime_context import get_disagg, get_exec, get_model, get_parallel, get_serving, get_spec

    if get_exec().features.return_hidden_states_mode != "full":
        yield "a server whose arguments were resolved before hsxfer was loaded and lack --enable-return-hidden-states"
    if get_exec().features.enable_return_aux_hidden_states:
        yield "--enable-return-aux-hidden-states"
    if get_model().is_embedding:
        yield "a model that does not generate"
    if get_spec().speculative_algorithm is not None:
        yield "speculative decoding"
    if get_disagg().disaggregation_mode != "null":
        yield "prefill/decode disaggregation"
    if get_parallel().pp_size > 1:
        yield "pipeline parallelism"
    if get_parallel().attn_cp_size > 1:
        yield "context parallelism"
    if get_exec().dllm.dllm_algorithm is not None:
        yield "a diffusion model"
    if get_disagg().enable_pdmux:
        yield "--enable-pdmux"
    if envs.SGLANG_RUST_SERVER.get():
        yield "SGLANG_RUST_SERVER"
    if get_serving().tokenizer_worker_num > 1 and not io_struct._USE_PICKLE_IPC:
        yield "SGLANG_USE_PICKLE_IPC=0 with several tokenizer workers"


def on_send_request(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around `TokenizerManager._send_one_request`: the request that only warms the cache for `n > 1` wants no hidden states.

    sglang sends the prompt once with `max_new_tokens=0` and throws the reply away; its sample would lie unread for minutes.
    """

    def skip_warm_up() -> None:
        if getattr(request, "return_hidden_states", False) and request.sampling_params.max_new_tokens == 0:
            state = manager.rid_to_state[request.rid]
            # Only a warm-up keeps the times of the request it was copied from.
            if state.time_stats is not request.time_stats:
                request.return_hidden_states = False

    survive("recognise a warm-up request", nothing, skip_warm_up)
    return original(manager, request)


def on_output(original: Callable[..., Any], manager: Any, output: Any) -> Any:
    """Around `TokenizerManager._handle_batch_output`: handles out of the typed messages."""

    def unpack() -> None:
        states = getattr(output, "output_hidden_states", None)
        if states:
            output.output_hidden_states = [decode(entry) for entry in states]

    survive("read a handle out of a reply", nothing, unpack)
    return original(manager, output)


LAUNCHER_HOOKS = (
    Hook("sglang.srt.server_args.ServerArgs.resolve_once", on_resolve_arguments),
    Hook("sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes", on_launch),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request", on_send_request, ("tokenized_obj",)
    ),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output", on_output, ("recv_obj",)),
)

"""From `HSXFER_SINK` to hooks in place, or to a server that does not start and says why."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import os
import pkgutil
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from .guard import attempt, logger, refuse
from .plugin import Plugin

# sglang versions whose inside was read and tested, and the module that knows it.
ADAPTERS = {"0.5.23": "v0_5_23"}

# Set by the launcher for the processes it starts. Not HSXFER_INSTANCE: that is the user's, and a process started by a server's
# launcher that launches a server of its own inherits what is set here.
LAUNCH = "HSXFER_LAUNCH"


@dataclass(frozen=True)
class Hook:
    """`function(original, ...)` around the function named `target`, whose parameters must include `needs`."""

    target: str
    function: Callable[..., Any]
    needs: tuple[str, ...] = ()


def hook_up(url: str) -> None:
    """Register this process's hooks with sglang, which applies them after the last plugin."""
    if os.environ.get("HSXFER_LAYERS", "").strip():
        refuse("HSXFER_LAYERS is not supported yet; unset it to get the final hidden states")
    check_url(url)
    adapter = _adapter()
    hooks = [hook for group in _groups() for hook in getattr(adapter, group)]
    for hook in hooks:
        _check(hook)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType.AROUND)


def check_url(url: str) -> None:
    """Refuse, before a model is loaded, a URL that no rank could open."""
    from hsxfer.transports import resolve

    attempt(lambda error: refuse(f"HSXFER_SINK={url} cannot be used: {error}"), resolve, url)


def _adapter() -> Any:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        refuse("the package sglang that is running has no version; hsxfer cannot tell whether it knows it")
    adapter = adapter_for(found)
    if adapter is None:
        refuse(
            f"sglang {found} is not a version that this hsxfer knows ({', '.join(ADAPTERS)}); "
            "install one that it knows, or unset HSXFER_SINK to run without hidden-state transfer"
        )
    return importlib.import_module(f".{adapter}", __package__)


def adapter_for(sglang: str) -> str | None:
    """The module that knows this version of sglang, or None: then a server with `HSXFER_SINK` does not start."""
    return ADAPTERS.get(sglang.split(".post")[0].split("+")[0])


def _groups() -> tuple[str, ...]:
    """Which hooks this process needs. A hook imports its target's module, seconds that the detokenizer need not spend."""
    started_as = getattr(getattr(multiprocessing.current_process(), "_target", None), "__name__", "")
    if started_as.startswith(("run_detokenizer", "run_data_parallel_controller", "run_multi_detokenizer")):
        return ()
    if started_as.startswith("run_scheduler_process"):
        return ("SCHEDULER_HOOKS",)
    return ("LAUNCHER_HOOKS", "SCHEDULER_HOOKS")


def _check(hook: Hook) -> None:
    """Refuse to start if the target is not there, or not as the hook knows it."""

    def no_place(error: Exception) -> NoReturn:
        refuse(f"this sglang has no {hook.target} as hsxfer knows it ({error}); unset HSXFER_SINK to run without it")

    parameters = attempt(no_place, _parameters, hook.target)
    for need in hook.needs:
        if need not in parameters:
            no_place(TypeError(f"it has no parameter {need}"))


def _parameters(target: str) -> Collection[str]:
    owner, _, name = target.rpartition(".")
    return inspect.signature(getattr(pkgutil.resolve_name(owner), name)).parameters.keys()


def require_applied(hooks: Iterable[Hook]) -> None:
    """Refuse to start if sglang, which only logs a hook that it could not apply, left one out."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    left_out = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if left_out:
        refuse(f"sglang did not apply the hooks on {', '.join(left_out)}; its log says why")


def name_launch(num_nodes: int) -> None:
    """Give the server that is being started its name in the store, new at each start, the same in all its processes."""
    name = os.environ.get("HSXFER_INSTANCE", "").strip()
    if not name and num_nodes > 1:
        refuse("a server of several nodes needs HSXFER_INSTANCE, the same new name on each of them")
    os.environ[LAUNCH] = name or secrets.token_hex(6)


def open_plugin(
    tp: tuple[int, int], dp: tuple[int, int], pp: tuple[int, int], width: int, dtype: str, row_bytes: int, model: str
) -> Plugin:
    """Open this rank's sink. Ends the process with one sentence if it cannot be opened."""
    from hsxfer import Rank, open_sink

    url = os.environ["HSXFER_SINK"].strip()
    instance = os.environ.get(LAUNCH)
    if not instance:
        refuse("this scheduler was started by a launcher that hsxfer is not loaded in; it cannot name its samples")
    rank = Rank(tp=tp, dp=dp, pp=pp)
    sink = attempt(
        lambda error: refuse(f"HSXFER_SINK={url} cannot be opened: {error}"),
        open_sink,
        url,
        rank=rank,
        policy="leader",
        instance=instance,
        model=model,
    )
    role = "sends hidden states to" if sink.sends else "sends nothing to"
    logger.info("hsxfer: rank %s of server %s %s %s", rank.label, instance, role, url)
    stats_dir = os.environ.get("HSXFER_STATS_DIR", "").strip()
    if stats_dir:
        os.makedirs(stats_dir, exist_ok=True)
    return Plugin(sink, rank.label, width, dtype, row_bytes, stats_dir)

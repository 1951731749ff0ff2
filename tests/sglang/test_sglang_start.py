"""How a server starts, or says in one sentence why it does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from reference import STORE, Stock
from servers import Config, Servers

import hsxfer

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"


def load_plugins(program: str = LOAD, **environment: str) -> subprocess.CompletedProcess[str]:
    """What every process of sglang does first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HSXFER_", "SGLANG_"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "SGLANG_USE_CPU_ENGINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1, done.stderr
    return done.stderr.rstrip().rpartition("\n")[2]


def test_switched_off_it_hooks_and_imports_nothing() -> None:
    program = f"""
import sys
{LOAD}
from sglang.srt.plugins.hook_registry import HookRegistry
assert not HookRegistry._hooks and not HookRegistry._patched
assert not [name for name in sys.modules if name.startswith("hsxfer.engines.sglang.")]
"""
    done = load_plugins(program)
    assert done.returncode == 0, done.stderr


def test_the_entry_module_imports_neither_torch_nor_sglang() -> None:
    program = "import sys, hsxfer.engines.sglang; assert not {'torch', 'numpy', 'sglang'} & set(sys.modules)"
    done = load_plugins(program, HSXFER_SINK=STORE)
    assert done.returncode == 0, done.stderr


def test_a_url_that_is_none_is_refused() -> None:
    assert sentence(load_plugins(HSXFER_SINK="shm://x?capcity=1GiB")).endswith("did you mean 'capacity'?")


def test_an_unknown_sglang_is_refused() -> None:
    program = f"import importlib.metadata as m; m.version = lambda name: '0.6.0'; {LOAD}"
    assert "sglang 0.6.0 is not a version that this hsxfer knows (0.5.23)" in sentence(
        load_plugins(program, HSXFER_SINK=STORE)
    )


def test_an_sglang_of_another_shape_is_refused() -> None:
    program = f"""
from sglang.srt.managers.scheduler import Scheduler
from hsxfer.engines.sglang import register
Scheduler._create_generation_req = lambda self, request: None
try:
    register()
except SystemExit as refused:
    print(refused)
del Scheduler._create_generation_req
{LOAD}
"""
    done = load_plugins(program, HSXFER_SINK=STORE)
    for said in (done.stdout, sentence(done)):
        assert said.startswith(
            "hsxfer: this sglang has no sglang.srt.managers.scheduler.Scheduler._create_generation_req as hsxfer knows it"
        )


def test_what_is_not_supported_is_refused_before_a_model_is_loaded(servers: Servers) -> None:
    config = Config("pp2", {"pp_size": 2, "model_path": "/nowhere"}, {"HSXFER_SINK": STORE})
    config.arguments["model_path"] = Config("any").all_arguments()["model_path"]
    with servers.refused(config) as printed:
        assert "hsxfer: pipeline parallelism is not supported with sglang 0.5.23" in printed
        assert "Load weight" not in printed


def test_a_store_that_cannot_be_opened_ends_the_server(servers: Servers) -> None:
    url = f"{STORE}-huge?capacity=4TiB"
    with servers.refused(Config("huge", environment={"HSXFER_SINK": url}, http=True)) as printed:
        assert f"hsxfer: HSXFER_SINK={url} cannot be opened: " in printed


def test_a_whitelist_without_hsxfer_is_told_by_the_client(stock_tp1: Stock) -> None:
    assert stock_tp1.hooks == []
    with pytest.raises(hsxfer.HandleError, match="plugin was not active"):
        hsxfer.Handle.from_meta_info(stock_tp1.replies[1])


def test_installed_but_off_is_stock(stock_tp2: Stock) -> None:
    assert stock_tp2.hooks == []
    for reply in stock_tp2.replies:
        assert len(reply["meta_info"]["hidden_states"][0]) == reply["meta_info"]["prompt_tokens"]

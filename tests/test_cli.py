"""The command `hsxfer`: what it says of stores and of this machine, its exit statuses, and how the demo ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import hsxfer
from hsxfer.cli import health, main, stores
from hsxfer.demo import server as demo_server
from hsxfer.demo.screen import show_comparison
from hsxfer.demo.server import DemoError, Server
from hsxfer.transports.shm import ORPHAN_S

DEAD_SINK = """
import hsxfer, numpy, os, signal, sys
sink = hsxfer.open_sink(sys.argv[1], instance="victim")
sink.put({"x": numpy.zeros((4, 256), "uint8")}, key="unread")
sink.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def shm(tmp_path: Path) -> str:
    """A directory that stands in for /dev/shm, so that other tests' stores are not seen."""
    return str(tmp_path)


@pytest.fixture
def sink(shm: str) -> Iterator[hsxfer.Sink]:
    with hsxfer.open_sink(f"shm://mine?capacity=1MiB&dir={shm}", instance="server") as sink:
        sink.put({"x": np.zeros((4, 256), "uint8")}, key="a")
        sink.begin("b", {"x": ((4, 256), "uint8")}).abort("no")
        sink.begin("c", {"x": ((4, 256), "uint8")})
        sink.flush()
        yield sink


def call(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(
        main, arguments, env={"COLUMNS": "120", "HSXFER_SINK": "", "SGLANG_PLUGINS": "", **(env or {})}
    )


def kill_a_sink(url: str) -> None:
    assert subprocess.run([sys.executable, "-c", DEAD_SINK, url], check=False).returncode == -signal.SIGKILL


# ---- inspect, top ----------------------------------------------------------------------------------------------------


def test_inspect_tells_what_is_in_an_arena(sink: hsxfer.Sink, shm: str) -> None:
    result = call("inspect", f"shm://mine?dir={shm}", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["store"] == "shm://mine"
    (arena,) = told["arenas"]
    assert 0 <= arena.pop("age_s") < 60
    assert arena.pop("file_bytes") > 1 << 20
    assert arena == {
        **{"instance": "server", "rank": "dp0-pp0-tp0", "state": "alive", "readers": False},
        **{"capacity_bytes": 1 << 20, "used_bytes": 2048},
        **{"num_ready": 1, "num_open": 1, "num_failed": 1, "num_unread": 1},
    }


def test_inspect_sees_readers_and_does_not_disturb_their_leases(sink: hsxfer.Sink, shm: str) -> None:
    url = f"shm://mine?dir={shm}"
    with hsxfer.open_source(url) as source, source.get("a", framework="numpy") as sample:
        for _ in range(2):
            assert json.loads(call("inspect", url, "--json").output)["arenas"][0]["readers"] is True
        assert sink.stats()["used_bytes"] == 2048, "still leased"
        assert not sample["x"].any()
    assert sink.stats()["used_bytes"] == 1024


def test_the_table_fits_a_terminal(sink: hsxfer.Sink, shm: str) -> None:
    result = call("inspect", f"shm://mine?dir={shm}", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if "dp0-pp0-tp0" in line]
    assert line.split()[:-2] == ["server", "dp0-pp0-tp0", "alive", "0%", "1.0", "MiB", "1", "1", "1", "none"]


def test_top_once(sink: hsxfer.Sink, shm: str) -> None:
    assert "alive" in call("top", f"shm://mine?dir={shm}", "--once").output
    assert "0 arenas" in call("top", f"shm://other?dir={shm}", "--once").output


def test_a_dead_producer_is_told_from_one_that_closed(shm: str) -> None:
    kill_a_sink(f"shm://mine?capacity=1MiB&dir={shm}")
    with hsxfer.open_sink(f"shm://other?capacity=1MiB&dir={shm}") as other:
        other.put({"x": np.zeros((4, 256), "uint8")})
    states = [stores.arenas(store)[0].state for store in stores.stores_of_user(shm)]
    assert states == ["dead", "closed"]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("inspect", "no-such-store"), 1, "shm://no-such-store has no arena"),
        (("inspect", "a/b"), 2, "NAME of 1 to 64 characters"),
        (("inspect", "smh://x"), 2, "did you mean 'shm'?"),
        (("top", "shm://x?capacty=1", "--once"), 2, "did you mean 'capacity'?"),
        (("inspect",), 2, "Missing argument"),
        (("frobnicate",), 2, "No such command"),
        (("demo", "--steps", "0"), 2, "not in the range"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], status: int, sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == status
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_a_store_of_others_is_refused(shm: str) -> None:
    os.mkdir(f"{shm}/hsxfer-{os.geteuid()}-open", 0o755)
    result = call("inspect", f"shm://open?dir={shm}")
    assert result.exit_code == 1
    assert "must be yours with mode 0700" in result.output.replace("\n", " ")


# ---- doctor ----------------------------------------------------------------------------------------------------------


def by_name(checks: list[health.Check]) -> dict[str, health.Check]:
    return {check.name: check for check in checks}


def test_doctor_without_a_sink(shm: str) -> None:
    checks = by_name(health.examine({}, shm))
    assert checks["hsxfer"].status == health.OK
    assert checks["numpy"].facts["version"] == np.__version__
    assert checks["shm://"].status == health.OK
    assert checks["HSXFER_SINK"].status == health.NOTE
    assert "left over" not in checks
    assert all(check.status != health.BAD for check in checks.values())


def test_doctor_as_json() -> None:
    result = call("doctor", "--json")
    told = json.loads(result.output)
    assert (result.exit_code, told["healthy"]) == (0, True), result.output
    assert {"name", "status", "found", "facts"} == set(told["checks"][0])


def test_doctor_imports_nothing_heavy() -> None:
    code = "import os, sys; from hsxfer.cli import health; health.examine(os.environ); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "cupy", "sglang", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("shm://x?capacty=1", "did you mean"),
        ("shm://x?capacity=200TiB", "wants 200.0 TiB"),
        ("nfs://x", "scheme 'nfs'"),
    ],
)
def test_a_sink_that_cannot_be_is_bad(url: str, sentence: str) -> None:
    result = call("doctor", env={"HSXFER_SINK": url})
    assert result.exit_code == 1
    assert sentence in result.output


@pytest.mark.parametrize(
    ("whitelist", "sglang", "registered", "status", "sentence"),
    [
        (None, "0.5.23", ["hsxfer", "other"], health.OK, "would load into sglang 0.5.23"),
        ("", "0.5.23", ["hsxfer"], health.OK, "would load"),
        ("other, hsxfer", "0.5.23", ["hsxfer"], health.OK, "would load"),
        ("other", "0.5.23", ["hsxfer"], health.BAD, "SGLANG_PLUGINS=other leaves it out"),
        (None, None, ["hsxfer"], health.BAD, "no sglang"),
        (None, "0.5.23", ["other"], health.BAD, "no entry point 'hsxfer'"),
        (None, "0.5.23.post1", ["hsxfer"], health.OK, "would load into sglang 0.5.23.post1"),
        (None, "0.4.0", ["hsxfer"], health.BAD, "would not start: hsxfer knows sglang 0.5.23, this is 0.4.0"),
    ],
)
def test_whether_the_plugin_would_load(
    whitelist: str | None, sglang: str | None, registered: list[str], status: str, sentence: str
) -> None:
    found, told = health.plugin_verdict(whitelist, sglang, registered)
    assert found == status
    assert sentence in told


def test_reclaim_removes_what_the_dead_left_and_nothing_else(sink: hsxfer.Sink, shm: str) -> None:
    kill_a_sink(f"shm://dead?capacity=1MiB&dir={shm}")
    directory = Path(shm, f"hsxfer-{os.geteuid()}-mine")
    old = time.time() - 2 * ORPHAN_S
    for name in ("gone.dp0-pp0-tp0.arena.tmp", "gone.dp0-pp0-tp0.ack"):
        (directory / name).write_bytes(b"x" * 10)
        os.utime(directory / name, (old, old))
    (directory / "new.dp0-pp0-tp0.ack").touch()  # of an arena that is being made
    left = by_name(health.examine({}, shm))["left over"]
    assert left.status == health.WARNING
    assert len(left.facts["files"]) == 4

    files, num_bytes = health.reclaim(shm)
    assert files == 4
    assert num_bytes > 1 << 20
    assert sorted(path.name for path in directory.iterdir()) == [
        *("new.dp0-pp0-tp0.ack", "server.dp0-pp0-tp0.ack", "server.dp0-pp0-tp0.arena")
    ]
    assert not Path(shm, f"hsxfer-{os.geteuid()}-dead").exists()
    assert "left over" not in by_name(health.examine({}, shm))
    with hsxfer.open_source(f"shm://mine?dir={shm}") as source:
        assert not source.get("a", framework="numpy")["x"].any()


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `sglang` whose server says something and then does as `SCRIPT` says."""
    package = tmp_path / "sglang"
    (package / "srt/models").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("import os; exec(os.environ['SCRIPT'])")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def start(no_sglang: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(demo_server, "START_S", 5.0)
    monkeypatch.setattr(demo_server, "STOP_S", 1.0)
    return Server("the server", no_sglang, 1, no_sglang / "log", {"SCRIPT": script})


def test_a_server_that_fails_shows_the_end_of_its_log(no_sglang: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(no_sglang, "print('no such model'); raise SystemExit(3)", monkeypatch)
    with pytest.raises(DemoError, match=r"(?s)ended with status 3 at start.*no such model"):
        server.wait_ready()
    server.stop()


def test_a_server_that_never_answers_is_given_up_and_ended(no_sglang: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("child", child.pid, flush=True)
time.sleep(100)
"""
    server = start(no_sglang, script, monkeypatch)
    with pytest.raises(DemoError, match=r"(?s)not up after 5 s.*child"):
        server.wait_ready()
    child = int(server.log_tail().split()[-1])
    assert Path(f"/proc/{child}/exe").exists()
    server.stop()
    assert not Path(f"/proc/{child}/exe").exists()


def test_the_demo_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call("demo")
    assert result.exit_code == 1
    assert "the demo needs sglang" in result.output


def test_the_table_shows_no_ratio_to_noise(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    def side(seconds: float, cpu: float, rows: int) -> dict:
        spread = {"median": cpu, "spread": 0.03}
        return {
            **{"seconds": seconds, "hidden_s": spread, "hidden_cpu_s": [spread, spread]},
            **{"reply_bytes": 1000 * seconds, "rows": rows},
        }

    told = {
        "hsxfer_counted_cpu_s": [0.04, 0.0],
        "num_prompts": 3,
        "num_tokens": 300,
        "in_flight": 8,
        "hidden_size": 192,
        "repeats": 4,
    }
    checked = {"num_prompts": 4, "num_rows": 400, "num_equal": 4}
    result = {**told, "checked": checked, "stock": side(2.0, 0.3, 250), "hsxfer": side(1.0, -0.01, 300)}
    show_comparison(Console(width=100), result)
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "rank 1 for them" in line]
    assert line.split()[-6:] == ["0.30", "±", "0.03", "-0.01", "±", "0.03"]
    (line,) = [line for line in shown.splitlines() if "rank 1, in hsxfer's hooks" in line]
    assert line.split()[-1] == "0.000"
    assert "left 50 rows out" in shown

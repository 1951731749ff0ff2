"""The benchmarks run, verify their bytes and report every row of their table; nothing is measured here."""

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def test_quick_run_reports_every_row(tmp_path):
    from benchmarks.draw import draw, markdown
    from benchmarks.rows import ROWS

    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "-o", "addopts=", "-p", "no:cacheprovider"]
    options = ["--benchmark-only", "--quick", "--results", str(results)]
    run = subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with run:
        try:
            out, err = run.communicate(timeout=280)
        finally:
            run.kill()
    assert run.returncode == 0, out[-4000:] + err[-2000:]
    assert not list(Path("/dev/shm").glob(f"hsxfer-*-bench-{run.pid}-*"))
    report = json.loads(results.read_text())
    assert {row["name"] for row in report["rows"]} == set(ROWS)
    assert report["arguments"]["quick"]
    draw(report, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 10_000
    assert all(name in markdown(report, every=True) for name in ROWS)


def test_baselines_copy_what_they_say():
    from benchmarks.workloads import SharedMemory, memmove_to_new, random_rows, same_bytes

    tensor = random_rows(1 << 16)
    memory = SharedMemory(tensor.nbytes)
    memory.memmove(tensor)
    assert bytes(memory.view) == tensor.view(torch.uint8).numpy().tobytes()
    assert same_bytes(memmove_to_new(tensor), tensor)

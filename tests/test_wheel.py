"""One wheel for every Python: built once, and the same files run under each that this machine has, with neither torch nor numpy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def pythons() -> dict[str, str]:
    """Version -> an interpreter, from PATH and from pyenv."""
    roots = [os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")]
    found: dict[str, str] = {"{}.{}".format(*sys.version_info): sys.executable}
    for version in VERSIONS:
        candidates = [shutil.which(f"python{version}")]
        for root in filter(None, roots):
            candidates += sorted(map(str, Path(root, "versions").glob(f"{version}*/bin/python{version}")))
        for candidate in filter(None, candidates):
            tell = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            asked = subprocess.run(tell, capture_output=True, text=True)
            if asked.returncode == 0 and asked.stdout.strip() == version:  # a shim may be there and lead nowhere
                found.setdefault(version, candidate)
    return found


PYTHONS = pythons()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    place = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("*.so", "*.pyc", "__pycache__")
    for part in ("csrc", "hsxfer"):
        shutil.copytree(ROOT / part, place / "src" / part, ignore=skip)
    for objects in ROOT.glob("build/temp*/plain"):  # those that are newer than their sources need not be compiled again
        shutil.copytree(objects, place / "src" / objects.relative_to(ROOT))
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, place / "src" / part)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place)]
    subprocess.run([*pip, str(place / "src")], check=True, capture_output=True, text=True)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, text=True)
    return target


def test_the_wheel_is_for_every_python_from_3_10(wheel: Path) -> None:
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("hsxfer", "cp310", "abi3")
    assert platform.startswith("manylinux_2_")
    files = zipfile.ZipFile(wheel).namelist()
    assert [file for file in files if ".so" in file] == ["hsxfer/libhsxfer.so"]
    assert "hsxfer/py.typed" in files
    assert {file.split("/")[0] for file in files} == {"hsxfer", f"{wheel.name.split('-cp')[0]}.dist-info"}


SCRIPT = """
import sys
for name in ("torch", "numpy", "cupy", "ml_dtypes", "click", "rich"):
    sys.modules[name] = None  # as if it were not installed
import array
import hsxfer

def doubles(memory):
    return [list(row) for row in memory.tolist()]

url = sys.argv[1]
rows = memoryview(array.array("d", range(12))).cast("B").cast("d", (4, 3))
with hsxfer.open_sink(url + "?capacity=1MiB") as sink, hsxfer.open_source(url) as source:
    handle = sink.put({"x": rows, "raw": b"abcd"}, token_ids=[5, 6, 7, 8], meta={"n": 1}, consumers=3)
    assert hsxfer.Handle.from_json(handle.to_json()) == handle
    with source.get(handle.to_json(), framework="memoryview", verify=True) as sample:
        assert sample["x"].tolist() == rows.tolist() and sample["x"].readonly
        assert sample["raw"].tobytes() == b"abcd"
        assert sample.token_ids.tolist() == [5, 6, 7, 8] and sample.meta == {"n": 1}
        sample.check(token_ids=[5, 6, 7, 8])
    part = source.get(handle, names=["x"], rows=slice(1, 3), framework="memoryview", copy=True)
    part["x"][0, 0] = -1.0
    assert part["x"].tolist() == [[-1.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    for framework in ("torch", "numpy"):
        try:
            source.get(handle, framework=framework)
        except hsxfer.ConfigError as error:
            assert "installed" in str(error), error
        else:
            raise AssertionError(framework)
    source.get(handle, framework="memoryview").release()
    try:
        source.get(handle, framework="memoryview")
    except hsxfer.SampleLost as error:
        assert error.reason == "consumed"
    sink.begin("gap", {"x": ((4, 3), "float64")}).commit()
    try:
        source.get("gap", framework="memoryview")
    except hsxfer.SampleFailed as error:
        assert error.missing == {"x": [(0, 4)]}
ranks = [hsxfer.Rank(tp=(n, 2)) for n in (0, 1)]
sinks = [hsxfer.open_sink(url + "?capacity=1MiB", rank, "shard", instance="i") for rank in ranks]
(handle,) = {sink.put({"x": rows}, "k") for sink in sinks}
with hsxfer.open_source(url) as source, source.get(handle, framework="memoryview") as sample:
    assert sample["x"].tolist() == rows.tolist()
for sink in sinks:
    sink.close()
print(hsxfer.__file__, "%d.%d" % sys.version_info[:2])
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_file_works_under(version: str, installed: Path, store: str, tmp_path: Path) -> None:
    if version not in PYTHONS:
        pytest.skip(f"this machine has no Python {version}")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # -S: without this Python's own site-packages, where another hsxfer may be.
    done = subprocess.run(
        [PYTHONS[version], "-S", "-B", str(script), store],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "hsxfer/__init__.py"), version]

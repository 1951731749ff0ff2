"""What `hsxfer doctor` looks at. Each check says what it found, and how to put right what is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from hsxfer import __version__, _native
from hsxfer.cli.stores import SHM_DIR, age, arenas, size, stores_of_user
from hsxfer.config import StoreUrl, parse_url
from hsxfer.engines.sglang.setup import ADAPTERS, adapter_for
from hsxfer.errors import ConfigError, HsxferError, TransportUnavailable
from hsxfer.transports import TRANSPORTS
from hsxfer.transports.shm import ORPHAN_S, check_private, leftovers, store_dir

OK, NOTE, WARNING, BAD = "ok", "note", "warning", "bad"

PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "hsxfer"


@dataclass(frozen=True)
class Check:
    """`status`: ok, note (not there, not needed), warning, or bad: something would not work."""

    name: str
    status: str
    found: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(environ: Mapping[str, str], shm_dir: str = SHM_DIR) -> list[Check]:
    checks = [_hsxfer(), *_gpu(), *_packages(), *_transports()]
    return [*checks, _shm(shm_dir), _memlock(), *_stores(shm_dir), *_left_over(shm_dir), *_engine(environ, shm_dir)]


def _hsxfer() -> Check:
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    try:
        library = _native.load()
    except TransportUnavailable as error:
        return Check("hsxfer", BAD, f"{error} ({python})")
    facts = {"version": __version__, "abi": _native.ABI_VERSION, "library": str(library.path)}
    return Check("hsxfer", OK, f"{__version__}, native library with ABI {_native.ABI_VERSION}, {python}", facts)


def _gpu() -> Iterator[Check]:
    """Without a look at a device: that would take a context, half a GiB of its memory."""
    try:
        missing = _native.load().fast.hsx_kernels_missing().decode()
    except TransportUnavailable:
        return  # said already
    lacks = (
        f"{missing}. Digests of tensors from a GPU are made on the CPU then, and ?encode= takes none" if missing else ""
    )
    yield Check("CUDA kernels", NOTE if missing else OK, lacks or "built in", {"missing": missing or None})
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        yield Check("CUDA driver", NOTE, f"not here, so tensors move from and to host memory only ({error})")
    else:
        yield Check("CUDA driver", OK, "libcuda.so.1 loads")


def _packages() -> Iterator[Check]:
    """From what is installed, not by importing: torch alone takes seconds."""
    for name, distributions in (
        *(("torch", ("torch",)), ("numpy", ("numpy",)), ("ml_dtypes", ("ml_dtypes",))),
        ("cupy", ("cupy", "cupy-cuda12x", "cupy-cuda13x")),
        *(("mooncake", ("mooncake-transfer-engine",)), ("sglang", ("sglang",))),
    ):
        found = next(filter(None, map(_version, distributions)), None)
        yield Check(name, OK if found else NOTE, found or "not installed", {"version": found})


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _transports() -> Iterator[Check]:
    for scheme, transport in TRANSPORTS.items():
        reason = transport.is_viable()
        yield Check(f"{scheme}://", NOTE if reason else OK, reason or "works here", {"reason": reason})


def _shm(shm_dir: str) -> Check:
    try:
        system = os.statvfs(shm_dir)
    except OSError as error:
        return Check(shm_dir, BAD, f"{error.strerror}: shm:// stores have nowhere to be")
    total, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    facts = {"total_bytes": total, "free_bytes": free}
    if not os.access(shm_dir, os.W_OK | os.X_OK):
        return Check(shm_dir, BAD, "not writable: shm:// stores have nowhere to be", facts)
    return Check(shm_dir, OK, f"{size(free)} free of {size(total)}", facts)


def _memlock() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    return Check("memlock", NOTE, f"{text}; pinning for CUDA does not need it, RDMA does", {"soft": soft, "hard": hard})


def _stores(shm_dir: str) -> Iterator[Check]:
    for store in stores_of_user(shm_dir):
        try:
            found = arenas(store)
        except (HsxferError, OSError) as error:
            yield Check(str(store), WARNING, str(error))
            continue
        told = [
            f"{arena.instance} {arena.rank} {arena.state}, {size(arena.used_bytes)} of {size(arena.capacity_bytes)}, "
            f"{arena.num_unread} unread, {'read' if arena.readers else 'no reader'}, {age(arena.age_s)} old"
            for arena in found
        ]
        yield Check(str(store), OK, "; ".join(told) or "no arena", {"arenas": [arena.to_dict() for arena in found]})


def _left_over(shm_dir: str) -> Iterator[Check]:
    found = list(left_over_files(shm_dir))
    if found:
        facts = {"files": [{"path": path, "bytes": num, "reason": reason} for path, num, reason in found]}
        told = f"{len(found)} files, {size(sum(num for _, num, _ in found))}, of servers that are gone"
        yield Check("left over", WARNING, f"{told}: hsxfer doctor --reclaim removes them", facts)


def left_over_files(shm_dir: str = SHM_DIR) -> Iterator[tuple[str, int, str]]:
    """`(path, bytes, why)` of what no living process will use: arenas of the dead, and files of arenas never finished."""
    for store in stores_of_user(shm_dir):
        directory = store_dir(store)
        with contextlib.suppress(OSError, TransportUnavailable):  # not ours, or going away as we look
            check_private(directory)
            for gone in leftovers(directory, unread_too=True):
                yield f"{gone.path}.arena", gone.num_bytes, gone.reason
                yield f"{gone.path}.ack", _file_bytes(f"{gone.path}.ack"), gone.reason
            yield from _strays(directory)


def _strays(directory: str) -> Iterator[tuple[str, int, str]]:
    for path in map(str, sorted(Path(directory).iterdir())):
        unfinished = path.endswith(".tmp")
        alone = path.endswith(".ack") and not os.path.exists(path.removesuffix(".ack") + ".arena")
        if (unfinished or alone) and time.time() - os.lstat(path).st_mtime > ORPHAN_S:
            yield path, _file_bytes(path), "never finished" if unfinished else "its arena is gone"


def _file_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def reclaim(shm_dir: str = SHM_DIR) -> tuple[int, int]:
    """Removes left-over files and the directories that they leave empty. Returns how many files, and their bytes."""
    files = num_bytes = 0
    for path, file_bytes, _ in list(left_over_files(shm_dir)):
        with contextlib.suppress(OSError):
            os.unlink(path)
            files, num_bytes = files + 1, num_bytes + file_bytes
    for store in list(stores_of_user(shm_dir)):
        with contextlib.suppress(OSError):  # in use
            os.rmdir(store_dir(store))
    return files, num_bytes


def _engine(environ: Mapping[str, str], shm_dir: str) -> Iterator[Check]:
    """Would a server started in this environment, with this Python, send hidden states?"""
    url = environ.get("HSXFER_SINK", "").strip()
    if not url:
        yield Check("HSXFER_SINK", NOTE, "not set: a server started from here does not use hsxfer")
        return
    try:
        store = parse_url(url, tuple(TRANSPORTS))
    except ConfigError as error:
        yield Check("HSXFER_SINK", BAD, str(error))
        return
    yield Check("HSXFER_SINK", *_room(store, shm_dir), {"url": url})
    yield Check("sglang plugin", *plugin_verdict(environ.get("SGLANG_PLUGINS"), _version("sglang")))


def _room(store: StoreUrl, shm_dir: str) -> tuple[str, str]:
    wanted = store.options.capacity_bytes
    try:
        check_private(store_dir(store))
    except FileNotFoundError:
        pass
    except TransportUnavailable as error:
        return BAD, str(error)
    system = os.statvfs(store.options.dir if os.path.isdir(store.options.dir) else shm_dir)
    free = system.f_bavail * system.f_frsize
    if wanted > free:
        return BAD, f"{store} wants {size(wanted)} a sending rank and {store.options.dir} has {size(free)} free"
    return OK, f"{store}, {size(wanted)} a sending rank"


def plugin_verdict(
    whitelist: str | None, sglang: str | None, registered: Iterable[str] | None = None
) -> tuple[str, str]:
    """`(status, sentence)`. `whitelist`: SGLANG_PLUGINS. `registered`: plugin names, by default those of this Python."""
    if registered is None:
        registered = [entry.name for entry in entry_points(group=PLUGIN_GROUP)]
    if PLUGIN not in registered:
        return BAD, f"would not load: no entry point {PLUGIN!r} in {PLUGIN_GROUP}; install hsxfer in {sys.executable}"
    if sglang is None:
        return BAD, f"would not load: no sglang in {sys.executable}; install hsxfer in sglang's own Python"
    allowed = {name.strip() for name in (whitelist or "").split(",") if name.strip()}
    if allowed and PLUGIN not in allowed:
        return BAD, f"would not load: SGLANG_PLUGINS={whitelist} leaves it out; add {PLUGIN}"
    if adapter_for(sglang) is None:
        return BAD, f"the server would not start: hsxfer knows sglang {', '.join(ADAPTERS)}, this is {sglang}"
    return OK, f"would load into sglang {sglang}"

"""`shm://NAME`: a directory in /dev/shm with two files per sending rank (docs/format.md, 1)."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..arena import Arena, ArenaReader, probe
from ..config import StoreUrl
from ..errors import ConfigError, TransportUnavailable

if TYPE_CHECKING:
    from .._native import Slot

log = logging.getLogger("hsxfer")

ORPHAN_S = 60.0


class Leftover(NamedTuple):
    path: str
    num_bytes: int
    reason: str


class ShmTransport:
    scheme = "shm"

    def is_viable(self) -> str | None:
        return None if sys.platform == "linux" else f"shared memory arenas need Linux, this is {sys.platform}"

    def open_arena(self, url: StoreUrl, instance: str, label: str) -> Arena:
        directory, options = store_dir(url), url.options
        path = os.path.join(directory, f"{instance}.{label}")
        for attempt in range(3):
            try:
                make_private(directory)
                reclaim(directory, unread_too=True)
                return ShmArena(path, options.capacity_bytes, options.unread_ttl_s, options.num_slots)
            except (TransportUnavailable, FileNotFoundError):
                # Another sink that closed may have removed the directory between the two.
                if attempt == 2 or os.path.isdir(directory):
                    raise
        raise AssertionError

    def open_store(self, url: StoreUrl) -> ShmStore:
        return ShmStore(store_dir(url))


class ShmArena(Arena):
    """Removes the store's directory when the last arena in it goes. The .ack file's mtime tells when it published last."""

    _touched_s = 0.0

    def submit_seal(self, slot: Slot, tail: bytes, failed: bool) -> int:
        submission = super().submit_seal(slot, tail, failed)
        now = time.monotonic()
        if now - self._touched_s > 1:
            self._touched_s = now
            with contextlib.suppress(OSError):
                os.utime(self.path + ".ack")
        return submission

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # not empty: others are there, or unread samples
            os.rmdir(os.path.dirname(self.path))


class ShmStore:
    """Arenas of one directory, which need not exist yet."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._readers: dict[str, ArenaReader] = {}
        self._strangers: set[str] = set()
        with contextlib.suppress(FileNotFoundError):
            check_private(directory)
            reclaim(directory, unread_too=False)

    def reader(self, instance: str, label: str) -> ArenaReader | None:
        name = f"{instance}.{label}"
        if name not in self._readers:
            self._drop_dead()  # a server that starts again comes with new arenas
        return self._open(name)

    def readers(self) -> list[ArenaReader]:
        self._drop_dead()
        found = []
        for path in arena_paths(self._directory):
            try:
                reader = self._open(os.path.basename(path))
            except ConfigError as error:
                if path not in self._strangers:
                    log.warning("%s", error)
                    self._strangers.add(path)
                continue
            if reader is not None:
                found.append(reader)
        return found

    def close(self) -> None:
        readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.close()
        # The last to read what a closed producer left takes the left-overs along.
        with contextlib.suppress(OSError, TransportUnavailable):
            check_private(self._directory)
            reclaim(self._directory, unread_too=False)
            os.rmdir(self._directory)

    def _open(self, name: str) -> ArenaReader | None:
        reader = self._readers.get(name)
        if reader is None:
            path = os.path.join(self._directory, name)
            if not os.path.exists(path + ".arena"):
                return None
            try:
                check_private(self._directory)
                reader = ArenaReader(path)
            except FileNotFoundError:
                return None
            except (ConfigError, TransportUnavailable):
                if os.path.exists(path + ".arena"):
                    raise
                return None  # unlinked between the two
            self._readers[name] = reader
        return reader

    def _drop_dead(self) -> None:
        """Forgets arenas that were unlinked, so that their memory goes when the last view of it does."""
        for name, reader in list(self._readers.items()):
            if not reader.num_leases and not os.path.exists(os.path.join(self._directory, name + ".arena")):
                del self._readers[name]
                reader.close()


def store_dir(url: StoreUrl) -> str:
    return os.path.join(url.options.dir, f"hsxfer-{os.geteuid()}-{url.name}")


def make_private(directory: str) -> None:
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise TransportUnavailable(f"cannot make {directory}: {error.strerror}") from None
    check_private(directory)


def check_private(directory: str) -> None:
    """Refuses a directory that somebody else could have put there or can look into."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise TransportUnavailable(f"{directory} is not a directory; remove it or choose another store name")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise TransportUnavailable(
            f"{directory} belongs to uid {status.st_uid} with mode {mode:04o}; it must be yours with mode 0700"
        )


def arena_paths(directory: str) -> Iterator[str]:
    """Paths of the arenas in a store's directory, without their suffix."""
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for name in names:
        if name.endswith(".arena"):
            yield os.path.join(directory, name.removesuffix(".arena"))


def leftovers(directory: str, unread_too: bool) -> list[Leftover]:
    """Arenas whose producer is gone and which nobody will read.

    A producer that closed in order left an arena only for the samples still unread in it: it stays until they are read or
    their time is up. One that died left whatever it had; `unread_too` says that it may go although samples in it are
    unread. A consumer that has it mapped keeps it.
    """
    found = []
    for path in arena_paths(directory):
        try:
            info = probe(path)
            age_s = time.time() - os.stat(path + ".ack").st_mtime  # since it published last
        except ConfigError:
            continue  # not an arena; not ours to remove
        except (TransportUnavailable, FileNotFoundError):
            continue  # unlinked meanwhile
        if info["alive"]:
            continue
        unread = info["num_unread"]
        if info["closed"]:
            if unread and age_s < info["unread_ttl_us"] / 1e6:
                continue
            reason = "closed, nothing unread" if not unread else "closed, unread for too long"
        else:
            if unread and not unread_too and age_s < info["unread_ttl_us"] / 1e6:
                continue
            reason = f"its producer died, {unread} samples unread"
        found.append(Leftover(path, info["file_bytes"], reason))
    return found


def reclaim(directory: str, unread_too: bool) -> list[Leftover]:
    """Unlinks `leftovers`, and the .ack files of producers killed before their arena had a name; returns the former."""
    gone = leftovers(directory, unread_too)
    for leftover in gone:
        for suffix in (".arena", ".ack"):
            with contextlib.suppress(OSError):
                os.unlink(leftover.path + suffix)
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            # The arena follows its .ack within microseconds.
            if (
                name.endswith(".ack")
                and not os.path.exists(path.removesuffix(".ack") + ".arena")
                and time.time() - os.stat(path).st_mtime > ORPHAN_S
            ):
                os.unlink(path)
    return gone

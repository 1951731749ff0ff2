"""One user's hidden states are nobody else's to read, to replace or to get in the way of."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from peer import Peer, fetch, pattern, told
from stores import store_dir

import hsxfer

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@needs_root
def test_another_user_reads_nothing(store: str, peer: Peer) -> None:
    def as_somebody_else(my: Any, url: str, paths: list[str], nobody: int) -> list[str]:
        pattern(0, (1,))  # what is imported late is imported now, while we may read it
        hsxfer.open_source(url).close()
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)
        outcomes = []
        for path in paths:
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.close(os.open(path, flags))
                    outcomes.append(f"opened {path}")
                except PermissionError:
                    outcomes.append("refused")
        try:
            os.listdir(os.path.dirname(paths[0]))
            outcomes.append("listed")
        except PermissionError:
            outcomes.append("refused")
        return outcomes

    with hsxfer.open_sink(store + "?capacity=1MiB") as sink:
        sink.put({"x": pattern(1, (10, 10))}, "k")
        paths = [str(path) for path in store_dir(store).iterdir()]
        assert peer(as_somebody_else, store, paths, NOBODY) == ["refused"] * 5
        # The name is another store of theirs, not a way into ours.
        with pytest.raises(hsxfer.TransferTimeout, match="0 arenas"):
            peer(fetch, store, "k", framework="numpy", timeout_s=0)

        def has_one_too(my: Any, url: str) -> Any:
            with hsxfer.open_sink(url + "?capacity=1MiB") as sink:
                sink.put({"x": pattern(2, (10, 10))}, "k")
                return fetch(my, url, "k", framework="numpy")["x"]

        assert peer(has_one_too, store) == told(pattern(2, (10, 10)))
        with hsxfer.open_source(store) as source, source.get("k", framework="numpy") as sample:
            assert told(sample["x"]) == told(pattern(1, (10, 10)))


def open_mode(directory: Path) -> str:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    return "mode 0755"


def group_mode(directory: Path) -> str:
    directory.mkdir()
    directory.chmod(0o710)
    return "mode 0710"


def foreign(directory: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user's")
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, NOBODY)
    return f"belongs to uid {NOBODY}"


def link(directory: Path) -> str:
    target = directory.with_name(directory.name + "-target")
    target.mkdir(mode=0o700)
    directory.symlink_to(target)
    return "is not a directory"


def dangling_link(directory: Path) -> str:
    directory.symlink_to(directory.with_name("nowhere"))
    return "is not a directory"


def file(directory: Path) -> str:
    directory.write_bytes(b"")
    return "is not a directory"


@pytest.mark.parametrize("make", [open_mode, group_mode, foreign, link, dangling_link, file])
def test_a_directory_that_another_could_have_made(store: str, tmp_path: Path, make: Any) -> None:
    url = f"{store}?dir={tmp_path}&capacity=1MiB"
    directory = tmp_path / store_dir(store).name
    early = hsxfer.open_source(url)
    before = sorted(tmp_path.rglob("*"))
    complaint = make(directory)
    made = sorted(set(tmp_path.rglob("*")) - set(before))
    for attempt in (lambda: hsxfer.open_sink(url), lambda: hsxfer.open_source(url)):
        with pytest.raises(hsxfer.TransportUnavailable, match=re.escape(str(directory)) + ".*" + complaint):
            attempt()
    assert sorted(set(tmp_path.rglob("*")) - set(before)) == made, "nothing was put into it"

    # A source that was opened before it appeared looks again when it finds something there.
    if directory.is_dir():
        elsewhere = hsxfer.open_sink(f"{store}?capacity=1MiB", instance="i")
        handle = elsewhere.put({"x": pattern(1, (10, 10))}, "k")
        for path in store_dir(store).iterdir():
            os.symlink(path, directory / path.name)
        for form in ("k", handle):
            with pytest.raises(hsxfer.TransportUnavailable, match=complaint):
                early.get(form, timeout_s=0)
        elsewhere.close()


def test_a_linked_arena_in_our_own_directory_is_refused(store: str, tmp_path: Path) -> None:
    """Files are opened without following links, so that nobody's file is taken for an arena."""
    with (
        hsxfer.open_sink(f"{store}?capacity=1MiB", instance="i") as sink,
        hsxfer.open_source(f"{store}?dir={tmp_path}") as source,
    ):
        handle = sink.put({"x": pattern(1, (10, 10))})
        directory = tmp_path / store_dir(store).name
        directory.mkdir(mode=0o700)
        for path in store_dir(store).iterdir():
            os.symlink(path, directory / path.name)
        with pytest.raises(hsxfer.ConfigError, match="not a file of ours"):
            source.get(handle, timeout_s=0)


def test_the_umask_does_not_matter(store: str) -> None:
    before = os.umask(0)
    try:
        with hsxfer.open_sink(f"{store}?capacity=1MiB"):
            modes = {oct(path.stat().st_mode & 0o777) for path in [store_dir(store), *store_dir(store).iterdir()]}
            assert modes == {"0o700", "0o600"}
    finally:
        os.umask(before)

"""The sglang plugin. sglang finds `register` through the entry-point group `sglang.srt.plugins`, in every process it starts.

`HSXFER_SINK=shm://NAME?capacity=8GiB` turns it on; unset, nothing is imported, opened or hooked. Further variables:

- `HSXFER_INSTANCE`: the server's name in the store, 1 to 32 of `A-Z a-z 0-9 _ -`; needed only where several nodes form one server.
- `HSXFER_STATS_DIR`: a directory where every rank keeps its counters as `dpD-ppP-tpT.json`.

This module imports the standard library only: it is loaded into every sglang server of a machine that has hsxfer installed.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Hook sglang if `HSXFER_SINK` is set. Raises `SystemExit` with one sentence if that is not possible.

    `SystemExit`, because sglang logs and forgets any `Exception` here: the server would come up without hsxfer, answer with lists of
    floats, and a trainer would wait for ever.
    """
    url = os.environ.get("HSXFER_SINK", "").strip()
    if url:
        from .setup import hook_up

        hook_up(url)

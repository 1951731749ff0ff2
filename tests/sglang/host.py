"""A process with an `sglang.Engine` in it, as a user's script would have: `python host.py ADDRESS KEYWORDS`.

Everything that arrives at the connection is a call of the engine; its result or its error goes back.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Client


def main() -> None:
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry

    engine = sglang.Engine(**json.loads(sys.argv[2]))
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send(sorted(HookRegistry._patched))
        while call := connection.recv():
            name, keywords = call
            try:
                connection.send((True, getattr(engine, name)(**keywords)))
            except Exception as error:  # noqa: BLE001 - the test sees it
                connection.send((False, f"{type(error).__name__}: {error}"))
    engine.shutdown()


if __name__ == "__main__":
    main()

"""Stores of a test's own. (Not in conftest.py: `import conftest` means another file in each directory.)"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

SHM = Path("/dev/shm")


@contextlib.contextmanager
def new_store() -> Iterator[str]:
    """The URL of a store that nobody else uses; what is left of it is removed."""
    name = f"test-{secrets.token_hex(6)}"
    try:
        yield f"shm://{name}"
    finally:
        shutil.rmtree(store_dir(f"shm://{name}"), ignore_errors=True)


def store_dir(url: str) -> Path:
    return SHM / f"hsxfer-{os.geteuid()}-{url.removeprefix('shm://').partition('?')[0]}"

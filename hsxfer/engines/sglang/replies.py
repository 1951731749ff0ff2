"""A handle in sglang's reply when `SGLANG_USE_PICKLE_IPC=0`.

sglang's typed messages allow lists of numbers there and nothing else, and kill the server over a dictionary. So the handle's JSON
travels as the numbers of its bytes behind a None, which no hidden state starts with.
"""

from __future__ import annotations

import json
from typing import Any


def encode(handle: dict[str, Any]) -> list[Any]:
    """A handle as a list that the typed message allows."""
    return [None, *json.dumps(handle, separators=(",", ":")).encode()]


def decode(states: Any) -> Any:
    """One request's `hidden_states` as received: `[handle]` again if `encode` made its only entry, else as it is."""
    if not (isinstance(states, list) and len(states) == 1):
        return states
    entry = states[0]
    if not (isinstance(entry, list) and len(entry) > 1 and entry[0] is None):
        return states
    return [json.loads(bytes(int(number) for number in entry[1:]))]

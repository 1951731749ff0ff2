"""What reaches a scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..plugin import Wanted

_MARK = re.compile(r"hsxfer:(\d+):")


class Messages:
    """The messages that `_pull_raw_reqs` gives."""

    def __init__(self) -> None:
        from sglang.srt.managers import io_struct

        self._one = io_struct.TokenizedGenerateReqInput
        self._batch = io_struct.BatchTokenizedGenerateReqInput
        self._abort = io_struct.AbortReq

    def split(self, message: Any) -> list[Any]:
        if isinstance(message, self._batch) and any(request.return_hidden_states for request in message.batch):
            return list(message.batch)
        return [message]

    def wanted(self, message: Any) -> Wanted | None:
        if not (isinstance(message, self._one) and message.return_hidden_states):
            return None
        refusal = ""
        if message.return_hidden_states == "last":
            refusal = 'return_hidden_states="last" is not supported by hsxfer; ask for True and read the last row'
        elif message.session_params is not None and message.session_params.id is not None:
            refusal = (
                "hidden states of session requests are not supported by hsxfer: their history is not computed again"
            )
        if message.input_embeds is not None:
            return Wanted(message.rid, len(message.input_embeds), None, refusal)
        return Wanted(message.rid, len(message.input_ids), message.input_ids[:], refusal)

    def aborts(self, message: Any) -> Callable[[str], bool] | None:
        if not isinstance(message, self._abort):
            return None
        return lambda rid: bool(message.abort_all or rid.startswith(message.rid))

    def mark(self, message: Any, number: int) -> None:
        # In front: LoRA reads the end. It travels to every rank, and as part of the cache's key it matches no earlier prompt.
        message.extra_key = f"hsxfer:{number}:{message.extra_key or ''}"


def number_of(message: Any) -> int | None:
    """The number that `mark` put on a message."""
    marked = _MARK.match(message.extra_key or "")
    return int(marked.group(1)) if marked else None

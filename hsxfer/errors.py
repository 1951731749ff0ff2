"""What can go wrong, one type for each thing a caller would do about it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Ranges = Mapping[str, Sequence[tuple[int, int]]]


class HsxferError(Exception):
    """Every error of hsxfer derives from this one."""


class ConfigError(HsxferError, ValueError):
    """A URL, an option or an argument is wrong; the message names the value. Nothing was done."""


class HandleError(HsxferError, ValueError):
    """A handle is malformed, of another store, or contradicts what the arena says about its sample."""


class StoreFull(HsxferError):
    """There is no room. Sizes are bytes of payload (at `open_sink`: of the file system).

    `needed_bytes > capacity_bytes` means that waiting will not help.
    """

    def __init__(self, message: str, needed_bytes: int = 0, free_bytes: int = 0, capacity_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.capacity_bytes = capacity_bytes


class SampleFailed(HsxferError):
    """The producer gave this sample up. `reason` says why; `missing` maps a tensor to its row ranges never written."""

    def __init__(self, message: str, reason: str = "", missing: Ranges | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message
        self.missing = dict(missing or {})


class SampleLost(HsxferError):
    """The sample is gone. `reason`: "consumed", "expired", "closed", "recycled", "producer died", "missing rank"."""

    def __init__(
        self, message: str, reason: str = ""
    ) -> None:  # the default is for pickle, which passes the message only
        super().__init__(message)
        self.reason = reason


class IntegrityError(HsxferError):
    """Rows differ from what was sent, or a sample is not the one that the caller describes."""


class TransferTimeout(HsxferError, TimeoutError):
    """Something did not happen in the time given for it; it may still happen."""


class TransportUnavailable(HsxferError):
    """This transport does not work here; the message says why and what would help."""

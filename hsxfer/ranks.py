"""Which rank sends which rows. Pure functions: every rank computes the same answer without asking another."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

POLICIES = ("leader", "shard")


@dataclass(frozen=True)
class Rank:
    """A process of an engine: `(index, size)` in each parallel dimension."""

    tp: tuple[int, int] = (0, 1)
    dp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp"):
            index, size = getattr(self, name)
            if not 0 <= index < size:
                raise ConfigError(f"Rank {name}=({index}, {size}): the index must be in 0..{size - 1}")

    @property
    def label(self) -> str:
        return _label(self.dp[0], self.pp[0], self.tp[0])


def _label(dp: int, pp: int, tp: int) -> str:
    return f"dp{dp}-pp{pp}-tp{tp}"


def senders(rank: Rank, policy: str) -> tuple[str, ...]:
    """Labels of the ranks that send the samples of `rank`'s group, in the order of their parts.

    Hidden states exist on the last pipeline stage only, the same on all its tensor-parallel ranks; each data-parallel rank has requests of
    its own.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    last_stage = rank.pp[1] - 1
    count = rank.tp[1] if policy == "shard" else 1
    return tuple(_label(rank.dp[0], last_stage, tp) for tp in range(count))


def cut(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """The `index`-th of `count` nearly equal ranges of the write `[start, stop)`: every link works on every chunk."""
    rows = stop - start
    return start + rows * index // count, start + rows * (index + 1) // count


def part_rows(rows: int, count: int) -> int:
    """Rows that one of `count` parts has room for: its share, and slack for the rounding of many small writes."""
    share = -(-rows // count)
    return rows if count == 1 else min(rows, share + share // 8 + 64)

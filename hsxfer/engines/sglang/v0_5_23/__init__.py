"""sglang 0.5.23: where its hidden states, requests and replies are. Read in its source and run on it."""

from .launcher import LAUNCHER_HOOKS
from .scheduler import SCHEDULER_HOOKS

__all__ = ["LAUNCHER_HOOKS", "SCHEDULER_HOOKS"]

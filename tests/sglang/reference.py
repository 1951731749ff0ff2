"""What hidden states are held to: stock sglang's own, bit for bit, and Hugging Face's, within bfloat16."""

from __future__ import annotations

import secrets
from typing import Any

from servers import MODEL, Config, Servers

STORE = f"shm://test-{secrets.token_hex(4)}"


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt; different seeds share no prefix."""
    return [(7 * position + 31 * seed + position * position // 3) % 1000 + 10 for position in range(length)]


class Reference:
    """What Hugging Face's implementation of the same model computes, in float32."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def states(self, ids: list[int]) -> Any:
        """Final normalised states, float32 `[len(ids), width]`."""
        with self._torch.inference_mode():
            return self._model.model(self._torch.tensor([ids])).last_hidden_state[0]

    def check(self, got: Any, ids: list[int]) -> None:
        """Every row is the row of its own position: close to it, and to no other."""
        want = self.states(ids)
        assert tuple(got.shape) == tuple(want.shape)
        got = got.float()
        norms = want.norm(dim=1)
        errors = (got - want).norm(dim=1) / norms
        assert errors.max() < 0.06, f"row {int(errors.argmax())} of {len(ids)} is off by {float(errors.max()):.3f}"
        nearest = self._torch.cdist(got, want).argmin(dim=1)
        far = (want[nearest] - want).norm(dim=1) / norms
        assert (far < 0.06).all(), (
            f"rows {(far >= 0.06).nonzero().flatten().tolist()[:8]} are nearer to other positions"
        )


STOCK = {"chunked_prefill_size": -1, "disable_radix_cache": True, "enable_return_hidden_states": True}
# The plugin is installed and switched on, and left out by the whitelist: stock sglang, and a user's mistake.
STOCK_TP1 = Config("stock-tp1", STOCK, {"HSXFER_SINK": STORE, "SGLANG_PLUGINS": "some-other-plugin"})
STOCK_TP2 = Config("stock-tp2", {**STOCK, "tp_size": 2})
BIT_LENGTHS = (1, 5, 33, 64, 200)


class Stock:
    """Replies of stock sglang, one request at a time, without chunks and cache; its server runs only while it is asked."""

    def __init__(self, servers: Servers, config: Config) -> None:
        server = servers.use(config)
        greedy = {"temperature": 0, "max_new_tokens": 4}
        self.replies = [
            server.generate(input_ids=prompt(length), sampling_params=greedy, return_hidden_states=True)
            for length in BIT_LENGTHS
        ]
        self.hooks: list[str] = server.hooks

    def states(self, number: int) -> Any:
        """The prompt's states as float lists -> float32 tensor."""
        import torch

        return torch.tensor(self.replies[number]["meta_info"]["hidden_states"][0])

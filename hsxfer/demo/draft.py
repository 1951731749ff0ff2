"""An EAGLE-style draft head: from a target's last hidden state and the next token to the next hidden state, one layer deep.

After EAGLE (Li et al., 2024, arXiv:2401.15077): the target's token embedding and LM head are used as they are and not trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN_WEIGHT = 1.0  # smooth L1 of the hidden states
TOKEN_WEIGHT = 0.1  # cross entropy of the tokens; EAGLE's weights


class Target(NamedTuple):
    """What the draft head takes from the target model: both float32 `[vocabulary, hidden]`."""

    embedding: Tensor
    lm_head: Tensor
    heads: int


def load_target(model_dir: Path) -> Target:
    """Reads two tensors and one number of a Hugging Face model directory."""
    from safetensors import safe_open

    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    found: dict[str, Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(file.keys()):
                found[name] = file.get_tensor(name).float()
    embedding = found["model.embed_tokens.weight"]
    return Target(embedding, found.get("lm_head.weight", embedding), config["num_attention_heads"])


class DraftHead(nn.Module):  # type: ignore[misc]
    """One pre-norm transformer layer over `[hidden state of t, embedding of token t + 1]`."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        width = target.embedding.shape[1]
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("lm_head", target.lm_head, persistent=False)
        self.fuse = nn.Linear(2 * width, width)
        self.layer = nn.TransformerEncoderLayer(
            *(width, target.heads, 4 * width), dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """`hidden` float32 `[samples, tokens, width]`, `next_tokens` int64 `[samples, tokens]` -> the hidden states one token on."""
        embedded = functional.embedding(next_tokens, self.embedding)
        # Embeddings are an order of magnitude smaller than hidden states: unscaled, the next token is learnt last.
        inputs = functional.rms_norm(torch.cat((hidden, embedded), dim=-1).unflatten(-1, (2, -1)), hidden.shape[-1:])
        fused = self.fuse(inputs.flatten(-2))
        causal = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        return self.out(self.layer(fused, src_mask=causal, is_causal=True))


class Score(NamedTuple):
    """`loss` is differentiable; `agreement` is the share of positions where draft and target prefer the same token."""

    loss: Tensor
    agreement: float
    positions: int


def score(draft: DraftHead, samples: list[tuple[Tensor, Tensor]]) -> Score:
    """Runs the draft over `(hidden states [tokens, width] of any dtype, token ids int64 [tokens])` of several samples.

    Position t sees hidden state t and token t + 1, and is held to hidden state t + 1.
    """
    hidden = nn.utils.rnn.pad_sequence([states.float() for states, _ in samples], batch_first=True)
    tokens = nn.utils.rnn.pad_sequence([ids for _, ids in samples], batch_first=True)
    lengths = torch.tensor([len(ids) - 1 for _, ids in samples])
    real = torch.arange(tokens.shape[1] - 1) < lengths[:, None]
    guessed = draft(hidden[:, :-1], tokens[:, 1:])[real]
    wanted = hidden[:, 1:][real]
    guessed_logits, wanted_logits = guessed @ draft.lm_head.T, wanted @ draft.lm_head.T
    loss = HIDDEN_WEIGHT * functional.smooth_l1_loss(guessed, wanted)
    loss = loss + TOKEN_WEIGHT * functional.cross_entropy(guessed_logits, wanted_logits.softmax(-1))
    agreement = (guessed_logits.argmax(-1) == wanted_logits.argmax(-1)).float().mean().item()
    return Score(loss, agreement, len(wanted))

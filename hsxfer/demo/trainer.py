"""The demo's trainer, a process of its own: from handles to the loss. `python -m hsxfer.demo.trainer STORE_URL MODEL_DIR STEPS BATCH`.

On stdin one handle a line, as JSON: first those of the samples set aside for evaluation, then an empty line, then those
to train on. On stdout one JSON object a line: a `Progress` after each step. Needs neither sglang nor the server's
address: hidden states come through the store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hsxfer import Sample
from hsxfer.data import SampleDataset
from hsxfer.demo.draft import DraftHead, load_target, score

LEARNING_RATE = 3e-3
WARM_UP_STEPS = 10
EVALUATE_EVERY = 10


def main() -> None:
    url, model_dir, steps, batch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)  # the engine's ranks want the other cores
    torch.manual_seed(0)
    draft = DraftHead(load_target(model_dir))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))

    # Copies: a view would keep its place in the arena for as long as we train.
    set_aside = [(states.clone(), tokens.clone()) for states, tokens in samples(url, lines_until_blank())]
    tell(step=0, **evaluate(draft, set_aside))
    stream = samples(url, lines_until_blank())
    for step in range(1, steps + 1):
        taken = list(islice(stream, batch))
        if not taken:
            break
        began = time.monotonic()
        scored = score(draft, taken)
        optimizer.zero_grad()
        scored.loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        tell(
            step=step,
            loss=scored.loss.item(),
            agreement=scored.agreement,
            num_samples=len(taken),
            num_tokens=sum(len(tokens) for _, tokens in taken),
            num_bytes=sum(states.nbytes + tokens.nbytes for states, tokens in taken),
            step_s=time.monotonic() - began,
            **(evaluate(draft, set_aside) if step % EVALUATE_EVERY == 0 or step == steps else {}),
        )


def samples(url: str, handles: Iterator[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """`(hidden states [tokens, width], token ids [tokens])` of each handle, views of shared memory."""

    def both(sample: Sample) -> tuple[Tensor, Tensor]:
        return sample["hidden_states"], sample.token_ids

    return iter(SampleDataset(url, handles, transform=both, on_error=complain, verify=True))


def complain(handle: Any, error: Exception) -> None:
    print(f"left out: {error}", file=sys.stderr)


def evaluate(draft: DraftHead, set_aside: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    if not set_aside:
        return {}
    with torch.no_grad():
        scored = score(draft, set_aside)
    return {"held_out_loss": scored.loss.item(), "held_out_agreement": scored.agreement}


def lines_until_blank() -> Iterator[str]:
    yield from iter(lambda: sys.stdin.readline().strip(), "")


def tell(**progress: Any) -> None:
    print(json.dumps(progress), flush=True)


if __name__ == "__main__":
    # Whoever reads our progress going away is a reason to end, not to complain.
    try:
        main()
    except BrokenPipeError:
        os._exit(1)

"""From the engine to the loss: a draft head that trains on the hidden states of a running sglang server.

    HSXFER_SINK=shm://spec-train python -m sglang.launch_server --model-path MODEL --port 30000
    python examples/train_draft.py http://127.0.0.1:30000 shm://spec-train MODEL TEXT.txt

hsxfer is installed where sglang is; nothing else ties the two together. `hsxfer demo` does the same with a progress
bar, the server started for you, and figures.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tokenizers import Tokenizer

from hsxfer import Handle
from hsxfer.data import SampleDataset
from hsxfer.demo.draft import DraftHead, load_target, score

IN_FLIGHT, CHUNK_CHARS, BATCH = 8, 1200, 8


def main() -> None:
    server, store, model_dir, text = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]).read_text()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(text[at : at + CHUNK_CHARS]).ids for at in range(0, len(text), CHUNK_CHARS)]

    # In time for the first handle: the dataset fetches samples ahead while the loop trains.
    dataset = SampleDataset(store, handles(server, prompts))
    draft = DraftHead(load_target(model_dir))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    batch = []
    for sample in dataset:
        batch.append((sample["hidden_states"], sample["token_ids"]))  # bfloat16 [tokens, width], int64 [tokens]
        if len(batch) == BATCH:
            scored = score(draft, batch)
            optimizer.zero_grad()
            scored.loss.backward()
            optimizer.step()
            print(f"loss {scored.loss.item():.3f}, agrees with the target on {scored.agreement:.1%}", flush=True)
            batch = []


def handles(server: str, prompts: list[list[int]]) -> Iterator[Handle]:
    """Sends the prompts, some at a time, and yields what stands in the replies where stock sglang puts lists of floats."""

    def ask(prompt: list[int]) -> Handle:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_hidden_states": True}
        request = urllib.request.Request(
            f"{server}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return Handle.from_meta_info(json.load(reply)["meta_info"])

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        yield from pool.map(ask, prompts)


if __name__ == "__main__":
    main()

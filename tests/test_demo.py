"""The demo without sglang: its trainer's process, fed by a stand-in for the server that sends random hidden states."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hsxfer
from hsxfer.demo.server import DemoError

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from hsxfer.demo import feed  # noqa: E402 - needs what the lines above look for
from hsxfer.demo.draft import DraftHead, load_target, score  # noqa: E402

VOCABULARY, WIDTH, TOKENS = 32, 16, 20


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file({"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    return tmp_path


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"shm://demo?capacity=1MiB&dir={tmp_path}"


@pytest.fixture
def sink(url: str) -> Iterator[hsxfer.Sink]:
    with hsxfer.open_sink(url) as sink:
        yield sink


class FakeServer:
    """Answers as sglang with the plugin does. The hidden state of a token is a function of it and of the one before."""

    def __init__(self, sink: hsxfer.Sink) -> None:
        self._sink = sink
        self.fail = False

    def generate(self, token_ids: list[int], hidden_states: bool) -> bytes:
        assert hidden_states
        if self.fail:
            handle = self._sink.begin(None, {"hidden_states": ((len(token_ids), WIDTH), "bfloat16")}).abort("no luck")
        else:
            angles = torch.tensor(token_ids)[:, None] * torch.arange(1, WIDTH + 1) / VOCABULARY
            states = (angles.sin() + 0.1 * angles.roll(1, 0).cos()).bfloat16()
            handle = self._sink.put({"hidden_states": states}, token_ids=token_ids)
        return json.dumps({"meta_info": {"hidden_states": [handle.to_dict()]}}).encode()


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (count, TOKENS), generator=generator).tolist()


def train(server: Any, url: str, model_dir: Path, steps: int, for_training: list[list[int]]) -> list[dict]:
    with feed.TrainerProcess(url, model_dir, steps, 4, model_dir / "log") as trainer:
        with trainer.feeding(server, prompts(4), for_training, 2):
            return list(trainer.progress())


def test_a_process_of_its_own_learns_from_shared_memory(sink: hsxfer.Sink, url: str, model_dir: Path) -> None:
    told = train(FakeServer(sink), url, model_dir, 30, prompts(120))
    assert [one["step"] for one in told] == list(range(31))
    assert told[-1]["held_out_loss"] < 0.7 * told[0]["held_out_loss"]
    assert told[1]["num_tokens"] == 4 * TOKENS
    assert told[1]["num_bytes"] == 4 * TOKENS * (2 * WIDTH + 8)
    stats = sink.stats()
    assert (stats["num_consumed"], stats["used_bytes"], stats["num_unread"]) == (124, 0, 0)


def test_a_failed_sample_is_left_out_and_told_of(sink: hsxfer.Sink, url: str, model_dir: Path) -> None:
    server = FakeServer(sink)
    original, calls, turn = server.generate, iter(range(1000)), threading.Lock()

    def sometimes(token_ids: list[int], hidden_states: bool) -> bytes:
        with turn:
            server.fail = next(calls) == 6
            return original(token_ids, hidden_states)

    server.generate = sometimes  # type: ignore[method-assign]
    told = train(server, url, model_dir, 2, prompts(8))
    assert [one.get("num_samples") for one in told] == [None, 4, 3]
    assert re.search("left out: sample 'put-.' failed: no luck", (model_dir / "log").read_text())


def test_what_goes_wrong_with_feeding_ends_it(
    sink: hsxfer.Sink, url: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FakeServer):
        num_calls = 0

        def generate(self, token_ids: list[int], hidden_states: bool) -> bytes:
            self.num_calls += 1
            if self.num_calls > 10:
                raise DemoError("the server is gone")
            return super().generate(token_ids, hidden_states)

    with pytest.raises(DemoError, match="the server is gone"):
        train(Broken(sink), url, model_dir, 10, prompts(40))


def test_a_silent_trainer_is_given_up(
    sink: hsxfer.Sink, url: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "STALL_S", 0.1)
    with pytest.raises(DemoError, match=r"nothing from the trainer for 0\.1 s"):
        train(FakeServer(sink), url, model_dir, 10**6, [])


def test_padding_changes_no_score(model_dir: Path) -> None:
    torch.manual_seed(0)
    draft = DraftHead(load_target(model_dir))
    samples = [(torch.randn(length, WIDTH), torch.randint(VOCABULARY, (length,))) for length in (5, 12)]
    together = score(draft, samples)
    apart = [score(draft, [sample]) for sample in samples]
    assert together.positions == sum(one.positions for one in apart) == 4 + 11
    weighted = sum(one.loss * one.positions for one in apart) / together.positions
    torch.testing.assert_close(together.loss, weighted)

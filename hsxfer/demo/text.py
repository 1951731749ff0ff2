"""Prompts: English text that the target model was not trained on, as token ids."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MAX_CHARS = 1200
MIN_TOKENS = 16


def find_model() -> Path | None:
    """The target model of the checkout that this package lies in, if it does."""
    model = Path(__file__).parents[2] / "examples/target_model/model"
    return model if (model / "config.json").exists() else None


def load_prompts(model_dir: Path) -> list[list[int]]:
    """Passages of about 430 tokens. The text is that of `corpus.py` beside the model, else Python's own manual pages."""
    from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(passage).ids for passage in _passages(model_dir.parent / "corpus.py")]
    return [prompt for prompt in prompts if len(prompt) >= MIN_TOKENS]


def _passages(corpus: Path) -> list[str]:
    if corpus.exists():
        spec = importlib.util.spec_from_file_location("hsxfer_demo_corpus", corpus)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        passages: list[str] = module.held_out_passages(MAX_CHARS)
        return passages
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return [text[start : start + MAX_CHARS] for start in range(0, len(text), MAX_CHARS)]

"""English text that ships with CPython 3.11, and its split into training and held-out documents.

Two kinds of document: each topic of `pydoc_data.topics` (what `help()` shows of the language reference) and, for each
top-level module or package of the standard library, its docstrings in source order. The sources are parsed, never
imported, so the text does not depend on what the platform can load.

A document's name alone decides its side of the split: every 3.11.x holds out the same documents, whatever else differs.
"""

import ast
import functools
import hashlib
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

# Tests, examples, what others installed, and build configuration (which takes `logging.config` along).
_SKIPPED = {"config", "dist-packages", "idle_test", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}

# Distributions package these apart from the rest, so the held-out text must not need them.
_OPTIONAL = {f"module:{name}" for name in ("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtle")}


def held_out_documents() -> list[str]:
    """Whole documents that the model never saw, of a few hundred to tens of thousands of characters each."""
    return list(_split()["held_out"].values())


def held_out_passages(max_chars: int = 1200) -> list[str]:
    """The held-out documents cut between paragraphs into passages of `max_chars` at most (1200: about 450 tokens).

    Passages shorter than a third of that (a document's last one, mostly) are left out.
    """
    return [p for text in held_out_documents() for p in _passages(text, max_chars) if len(p) * 3 >= max_chars]


def training_documents() -> list[str]:
    return list(_split()["training"].values())


def _is_held_out(name: str) -> bool:
    return name not in _OPTIONAL and hashlib.sha256(name.encode()).digest()[0] < 51  # about one document in five


@functools.cache
def _split() -> dict[str, dict[str, str]]:
    documents = {f"topic:{name}": text for name, text in topics.items()}
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if not any(part in _SKIPPED or part.startswith("config-") for part in parts):
            text = "\n\n".join(_docstrings(path))
            name = f"module:{parts[0]}"
            documents[name] = f"{documents.get(name, '')}\n\n{text}".strip()

    # Topics quote each other at length. Held-out documents come first, so what they share with others leaves the
    # training text, and the held-out text stays whole.
    split: dict[str, dict[str, str]] = {"held_out": {}, "training": {}}
    seen: set[str] = set()
    for name in sorted(documents, key=lambda name: (not _is_held_out(name), name)):
        fresh = []
        for paragraph in documents[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                seen.add(key)
                fresh.append(paragraph.strip("\n").rstrip())
        if fresh:
            split["held_out" if _is_held_out(name) else "training"][name] = "\n\n".join(fresh) + "\n"
    return split


def _docstrings(path: Path) -> list[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _passages(text: str, max_chars: int) -> list[str]:
    passages = [""]
    for paragraph in text.split("\n\n"):
        for start in range(0, len(paragraph), max_chars):
            piece = paragraph[start : start + max_chars]
            if len(passages[-1]) + 2 + len(piece) > max_chars:
                passages.append("")
            passages[-1] += "\n\n" * bool(passages[-1]) + piece
    return passages

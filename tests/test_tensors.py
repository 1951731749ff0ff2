"""Frameworks that are not there, or do not know a dtype: said before a sample is used up."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np
import pytest
import torch

import hsxfer
from hsxfer import tensors


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_framework_that_is_not_installed(store: str, monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": np.arange(4)})
        real = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == framework:
                raise ImportError(name)
            return real(name, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(builtins, "__import__", without)
            patch.delitem(sys.modules, framework)
            with pytest.raises(hsxfer.ConfigError, match=f"{framework}.* installed"):
                source.get(handle, framework=framework)
            with pytest.raises(hsxfer.ConfigError, match="installed"):
                source.get("never", framework=framework, timeout_s=0)  # at once, not after a wait
        source.get(handle).release()


def test_a_dtype_that_the_framework_lacks(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hsxfer.open_sink(store + "?capacity=1MiB") as sink, hsxfer.open_source(store) as source:
        handle = sink.put({"x": torch.zeros(4, dtype=torch.float8_e8m0fnu), "y": torch.zeros(4)}, consumers=2)
        tensors.dtype_of.cache_clear()
        with monkeypatch.context() as patch:
            patch.delattr(torch, "float8_e8m0fnu")
            with pytest.raises(hsxfer.ConfigError, match="torch has no float8_e8m0fnu"):
                source.get(handle)
            source.get(handle, names=["y"]).release()
        source.get(handle).release()

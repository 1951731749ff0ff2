"""What the tests of this folder share. They run where torch sees a GPU and are skipped elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import hsxfer

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)


def random_rows(rows: int, width: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    """Random bits, so NaNs and infinities too: whatever moves them must not care."""
    generator = torch.Generator("cuda").manual_seed(seed)
    item = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    bits = torch.randint(0, 256, (rows, width * item), dtype=torch.uint8, device="cuda", generator=generator)
    return bits.view(getattr(torch, dtype))


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.contiguous().cpu().view(torch.uint8), b.contiguous().cpu().view(torch.uint8)))


def slow_stream(milliseconds: float = 30) -> Any:
    """A stream that is busy for so long: what must wait for it and does not is seen."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * 1.5e6))
    return stream


def get_checked(url: str, handle: Any, **options: Any) -> hsxfer.Sample:
    with hsxfer.open_source(url) as source:
        return source.get(handle, verify=True, **options)

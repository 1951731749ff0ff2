"""Kernels beside the rate at which the same GPU copies its own memory."""

from __future__ import annotations

import torch

from hsxfer.encoding import encode, screen
from hsxfer.tensors import rows_of

from .figures import ROWS, WIDTH, Figures, gpu_seconds, random_rows


def kernels(figures: Figures) -> None:
    rows = torch.randn(ROWS, WIDTH, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(rows)
    rate = 2 * rows.numel() * 2 / gpu_seconds(lambda: target.copy_(rows))
    figures.add("device copy, bytes read and written", rate / 1e9, "GB/s", "-")
    told = rows_of(rows)
    out_bytes = rows.shape[0] * encode(told, "fp8").row_bytes
    for name, moved, function in (
        ("FP8 pack", rows.numel() * 2 + out_bytes, lambda: encode(told, "fp8")),
        ("FP8 eager, torch", rows.numel() * 2 + out_bytes, lambda: eager_fp8(rows)),
    ):
        taken = gpu_seconds(function)
        more = {"median_ms": 1e3 * taken, "gb_per_s": moved / taken / 1e9}
        goal = (">=", 0.7) if name == "FP8 pack" else ("", None)
        figures.add(name, moved / taken / rate, "ratio", "device copy rate", *goal, **more)
    taken = gpu_seconds(lambda: screen(random_rows(1, 8)) and None)
    screened = gpu_seconds(lambda: screen(rows))
    figures.add("NaN, infinity and zero rows, with their list", 1e3 * screened, "ms", "-", empty_ms=1e3 * taken)


def eager_fp8(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(1, keepdim=True).float() / 448
    return (rows.float() / scale).to(torch.float8_e4m3fn)

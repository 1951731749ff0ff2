"""`python -m benchmarks.gpu.draw RESULT.json PICTURE.svg`: every figure with a target as its share of that target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROW, LEFT, WIDTH, RIGHT = 22, 400, 420, 260
MOST = 1.5  # where the picture ends


def share(row: dict[str, Any]) -> float:
    """1 at the target, more beyond it; what falls far short of it is short in the picture, too."""
    value, target = max(float(row["value"]), 1e-4), float(row["target"])
    return min(MOST, value / target if row["op"] == ">=" else target / value)


def draw(told: dict[str, Any]) -> str:
    rows = [row for row in told["figures"] if row.get("target") is not None]
    height = ROW * (len(rows) + 4)
    goal = LEFT + WIDTH / MOST
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="12" y="20" font-size="15">The GPU path on one {escape(told["machine"]["gpu"])}: share of each target</text>',
    ]
    for number, row in enumerate(rows):
        top = ROW * (number + 2)
        colour = "#2f855a" if row["met"] else "#c05621"
        length = WIDTH / MOST * share(row)
        value = f"{row['value']:.4g} {row['unit']}  (target {row['op']} {row['target']:g})"
        lines += [
            f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(row["name"])}</text>',
            f'<rect x="{LEFT}" y="{top + 3}" width="{length:.1f}" height="{ROW - 6}" fill="{colour}"/>',
            f'<text x="{LEFT + WIDTH + 8}" y="{top + 15}">{escape(value)}</text>',
        ]
    bottom = ROW * (len(rows) + 2)
    lines += [
        f'<line x1="{goal:.1f}" x2="{goal:.1f}" y1="{2 * ROW - 4}" y2="{bottom + 4}" stroke="black" stroke-dasharray="3 3"/>',
        f'<text x="{goal:.1f}" y="{bottom + 20}" text-anchor="middle">target</text>',
        f'<text x="12" y="{bottom + 20}" fill="#555">commit {escape(str(told["commit"])[:10])}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(source.read_text())))

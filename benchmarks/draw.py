"""The table for the README and the picture, from a run's JSON: `python -m benchmarks.draw results.json [picture.svg]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .rows import GET_SIZES

ZERO_COPY = [f"get: {size} from {form}" for form in ("a Handle", "JSON") for size in GET_SIZES]
COLOURS = {"on": "#1f6f8b", "off": "#99c1cf", "limit": "#c0392b", "p99": "#e0a458"}


def markdown(report: dict[str, Any], every: bool = False) -> str:
    """A Markdown table; without `every` only the rows that have a target. CPU: of the calling thread, median."""
    lines = ["| figure | median | p99 | CPU | GB/s | against | ratio | target |", "|---|--:|--:|--:|--:|---|--:|---|"]
    for row in report["rows"]:
        if every or row["targets"]:
            cells = [
                row["name"],
                _time(row, "median"),
                _time(row, "p99"),
                _time(row, "cpu_median"),
                _number(row.get("gb_per_s")),
            ]
            cells += [row.get("baseline") or "", _number(row.get("ratio")), "; ".join(map(_verdict, row["targets"]))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _time(row: dict[str, Any], figure: str) -> str:
    return f"{_number(row[figure])} {row['unit'].replace('us', 'µs')}" if figure in row else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _verdict(target: dict[str, Any]) -> str:
    return f"{'PASS' if target['met'] else 'MISS'}: {target['figure']} {target['op']} {target['limit']:,g}"


def draw(report: dict[str, Any], path: Path) -> None:
    """One picture: how near a write comes to memcpy, what the caller's thread pays, the whole way."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "hsxfer", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams["axes.spines.right"] = False
    from matplotlib import pyplot

    rows = {row["name"]: row for row in report["rows"]}
    figure, (writes, caller, way) = pyplot.subplots(1, 3, figsize=(14, 4.6), width_ratios=(1, 1, 0.8))
    _draw_writes(writes, rows)
    _draw_caller(caller, rows)
    _draw_way(way, rows)
    machine = report["machine"]
    figure.suptitle(
        f"hsxfer {report['versions']['hsxfer']}, {machine['cores']} cores, {machine['cpu']}, commit {(report['commit'] or '?')[:7]}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_writes(axes: Any, rows: dict[str, Any]) -> None:
    names = [name for name in rows if name.startswith("write: ") and name.endswith("digest on")]
    for shift, digest, limit in ((-0.2, "off", 0.9), (0.2, "on", 0.75)):
        pairs = [rows.get(name.replace("digest on", f"digest {digest}")) for name in names]
        ratios = [row["ratio"] if row else 0 for row in pairs]
        label = "with digests (default)" if digest == "on" else "without"
        axes.barh([at + shift for at in range(len(names))], ratios, 0.38, color=COLOURS[digest], label=label)
        axes.axvline(limit, color=COLOURS[digest], linestyle="--", linewidth=1)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_yticks(range(len(names)), [name.removeprefix("write: ").removesuffix(", digest on") for name in names])
    axes.invert_yaxis()
    axes.set_title("put + flush, one memcpy = 1 (dashed: target)", loc="right")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2, frameon=False)


def _draw_caller(axes: Any, rows: dict[str, Any]) -> None:
    names = [name for name in rows if name.startswith("caller: ") or name in ZERO_COPY]
    names = [name for name in names if "busy" not in name]
    at = range(len(names))
    axes.barh(at, [rows[name]["median"] for name in names], 0.6, color=COLOURS["on"], label="median")
    axes.plot([rows[name]["p99"] for name in names], at, "o", color=COLOURS["p99"], markersize=4, label="p99")
    for y, name in enumerate(names):
        for target in rows[name]["targets"]:
            if target["figure"] == "median":
                label = "target for the median" if y == 0 else None
                axes.plot([target["limit"]] * 2, [y - 0.4, y + 0.4], color=COLOURS["limit"], label=label)
    axes.set_yticks(at, [name.removeprefix("caller: ").removesuffix(", alone") for name in names])
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlim(left=1)
    axes.set_title("what a call takes, µs")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=3, frameon=False)


def _draw_way(axes: Any, rows: dict[str, Any]) -> None:
    bars: list[tuple[str, float, str]] = []
    for name, label in (
        ("way: 64 MiB of bfloat16, against JSON", "lists, JSON"),
        ("way: 64 MiB of bfloat16 to another process", "lists, pickle"),
    ):
        if name in rows:
            bars.append((label, rows[name]["baseline_median"], "off"))
    name = "way: 64 MiB of bfloat16 to another process"
    if name in rows:
        bars.append(("hsxfer", rows[name]["median"], "on"))
    drawn = axes.barh([bar[0] for bar in bars], [bar[1] for bar in bars], color=[COLOURS[bar[2]] for bar in bars])
    axes.bar_label(drawn, [f"{bar[1]:,.4g} ms" for bar in bars], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(right=max((bar[1] for bar in bars), default=1) * 20)
    axes.invert_yaxis()
    axes.set_title("64 MiB to another process")


def main() -> None:
    source = Path(sys.argv[1])
    report = json.loads(source.read_text())
    draw(report, Path(sys.argv[2]) if len(sys.argv) > 2 else source.with_suffix(".svg"))
    print(markdown(report))


if __name__ == "__main__":
    main()

"""Draws what growth gains over the same networks trained from the first step.

    python3 bench/growth_picture.py --out docs/images/growth.svg FOLDER ...

Each FOLDER is one of `meristem growth bench` with the methods `width`, `static-width` and
`static-width-compute`. A dot is the mean of the differences in test score, paired by seed, and its
line the 95 % interval.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

BASELINES = (
    ("static-width", "equal parameters and steps", "#0072b2"),
    ("static-width-compute", "equal parameters and compute", "#d55e00"),
)
LEFT, RIGHT, TOP, ROW = 250, 690, 64, 58
RANGE = 3.0


def x(points: float) -> float:
    return LEFT + (points + RANGE) / (2 * RANGE) * (RIGHT - LEFT)


def text(at: tuple[float, float], words: str, anchor: str = "start", color: str = "#3c3c3c") -> str:
    return (
        f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" dy="0.35em" text-anchor="{anchor}" fill="{color}">'
        f"{words}</text>"
    )


def line(start: tuple[float, float], end: tuple[float, float], color: str, width: float = 1) -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{color}" stroke-width="{width}"/>'
    )


def tasks_of(folders: list[Path]) -> list[tuple[str, str, dict[str, dict[str, float]]]]:
    """Name, host and seeds, and differences of `width` by baseline, of each task that has them."""
    found = []
    for folder in folders:
        for task in json.loads((folder / "growth.json").read_text())["tasks"]:
            grown = next((row for row in task["methods"] if row["method"] == "width"), None)
            if grown is None or not grown["difference_pp"]:
                continue
            about = f"{task['host'].split(',blocks')[0]}, {len(grown['runs'])} seeds"
            score = {"accuracy": "accuracy", "r2": "R²"}.get(task["score"], task["score"])
            found.append((f"{task['task']}, {score}", about, grown["difference_pp"]))
    return found


def draw(tasks: list[tuple[str, str, dict[str, dict[str, float]]]]) -> str:
    bottom = TOP + ROW * len(tasks)
    parts = [text((16, 18), "Test score of networks that grow in width, less the score of the same networks")]
    parts.append(text((16, 42), "from the first step, with"))
    for place, (_, label, color) in enumerate(BASELINES):
        at = LEFT - 55 + 235 * place
        parts.append(f'<circle cx="{at + 5}" cy="42" r="5" fill="{color}"/>')
        parts.append(text((at + 16, 42), label))
    for points in range(-int(RANGE), int(RANGE) + 1):
        color = "#e1e1e1" if points else "#787878"
        parts.append(line((x(points), TOP), (x(points), bottom), color))
        parts.append(text((x(points), bottom + 16), f"{points:+d}" if points else "0", "middle"))
    parts.append(text(((LEFT + RIGHT) / 2, bottom + 40), "points of the test score", "middle"))
    for row, (name, about, differences) in enumerate(tasks):
        middle = TOP + ROW * (row + 0.5)
        parts.append(text((16, middle - 9), name))
        parts.append(text((16, middle + 10), about, color="#787878"))
        for place, (method, _, color) in enumerate(BASELINES):
            mean, half = differences[method]["mean"], differences[method]["ci95"]
            y = middle - 9 + 18 * place
            parts.append(line((x(mean - half), y), (x(mean + half), y), color, 3))
            parts.append(f'<circle cx="{x(mean):.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')
    size = (RIGHT + 30, bottom + 58)
    frame = f'width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}"'
    font = 'font-family="sans-serif" font-size="14"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {font}>'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, white, *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    tasks = tasks_of(args.folders)
    if not tasks:
        parser.error("no task has the methods width, static-width and static-width-compute")
    args.out.write_text(draw(tasks))


if __name__ == "__main__":
    main()

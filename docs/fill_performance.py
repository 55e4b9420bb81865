"""Writes the results of a benchmark into the tables of performance.md.

exactspec bench --plots docs --json > bench.json && python docs/fill_performance.py bench.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("performance.md")
GOAL_SIZE = [1, 4, 152064]
OURS = "verify_draft"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def operation(result: dict[str, Any]) -> str:
    """A line for each case; its cells have a figure for each number of threads."""
    rows = result["operation"]["results"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"] if name != OURS))
    cases: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        case = (*row["size"], row["setting"], row["dtype"], row["cold"])
        cases.setdefault(case, []).append(row)

    def cell(rows: list[dict[str, Any]], show) -> str:
        return " / ".join(show(row) for row in rows)

    def ratios(rows: list[dict[str, Any]], name: str) -> str:
        found = [row["peers"].get(name) for row in rows]
        shown = [f"{peer['ratio']:.1f}" if peer else "-" for peer in found]
        return " / ".join(shown) if any(found) else ""

    lines = []
    for (*size, setting, dtype, cold), rows in cases.items():
        lines.append(
            [
                ", ".join(map(str, size)),
                setting,
                f"{dtype}, {'cold' if cold else 'hot'}",
                cell(rows, lambda row: f"{row['peers'][OURS]['median_ms']:.3f}"),
                cell(rows, lambda row: f"{row['share_of_limit']:.0%}"),
                *(ratios(rows, name) for name in peers),
            ]
        )
    threads = [limit["threads"] for limit in result["operation"]["limits"]]
    unit = "ms" if None in threads else f"ms, {' / '.join(map(str, threads))} threads"
    return table(["B, K, V", "setting", "logits", unit, "of the limit", *peers], lines)


def loop(result: dict[str, Any]) -> str:
    header = ["prompt", "temperature", "peer", "tokens/s", "speed-up", "tokens per cycle"]
    lines = [
        [
            *(row["prompt"], f"{row['temperature']:g}", row["peer"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['tokens_per_cycle']:.2f}",
            "same" if row["same_greedy_text"] else "differs",
        ]
        for row in result["loop"]["results"]
    ]
    return table([*header, "greedy text"], lines)


def cycle(result: dict[str, Any]) -> str:
    rows = result["loop"]["cycle"]
    phases = list(rows[0]["ms"])
    lines = [
        [
            row["drafter"],
            *(f"{row['ms'][phase]:.2f}" for phase in phases),
            f"{row['outside_forwards']:.1%}",
        ]
        for row in rows
    ]
    return table(["drafter", *(f"{p}, ms" for p in phases), "outside the forwards"], lines)


def goals(lines: list[tuple[str, str, str, bool]]) -> str:
    rows = [[*texts, "yes" if reached else "**no**"] for *texts, reached in lines]
    return table(["what", "goal", "measured", "reached"], rows)


def operation_goals(result: dict[str, Any]) -> str:
    lines = []

    def add(what: str, goal: str, shown: str, reached: bool) -> None:
        lines.append((what, goal, shown, reached))

    def find(setting: str, threads: int) -> dict[str, Any] | None:
        for row in result["operation"]["results"]:
            same = row["size"] == GOAL_SIZE and row["setting"] == setting
            if same and row["threads"] == threads and row["dtype"] == "float32" and not row["cold"]:
                return row
        return None

    for limit in result["operation"]["limits"]:
        threads = limit["threads"]
        plain, filtered = find("temperature", threads), find("top_k and top_p", threads)
        where = f"{threads} thread(s)"
        if plain:
            share = plain["share_of_limit"]
            add(f"temperature, {where}", ">= 85 % of the limit", f"{share:.0%}", share >= 0.85)
            # Python's and MLX's part, which a call on 64 ids takes as well, is no exponential.
            own = plain["limit_ms"] / (plain["peers"][OURS]["median_ms"] - limit["call_ms"])
            what = f"temperature, {where}, without the time of a call on 64 ids"
            add(what, ">= 85 % of the limit", f"{own:.0%}", own >= 0.85)
            for part, least in (("composed", 100), ("NumPy", 10), ("Hugging Face", 25)):
                found = [p for n, p in plain["peers"].items() if n.startswith(part)]
                if found:
                    peer = min(found, key=lambda p: p["ratio"])
                    what = f"temperature, {where}, against {part}"
                    most = peer["median_ms"] / plain["limit_ms"]
                    shown = f"{peer['ratio']:.1f}x (at the limit it would be {most:.0f}x)"
                    add(what, f">= {least}x", shown, peer["ratio"] >= least)
        if plain and filtered:
            ours = (row["peers"][OURS]["median_ms"] for row in (filtered, plain))
            ratio = next(ours) / next(ours)
            what = f"top_k 20 + top_p 0.95, {where}, over unfiltered"
            add(what, "<= 1.4x", f"{ratio:.2f}x", ratio <= 1.4)
            if "MTPLX's host rule" in filtered["peers"]:
                ratio = filtered["peers"]["MTPLX's host rule"]["ratio"]
                what = f"top_k 20 + top_p 0.95, {where}, against MTPLX's host rule"
                add(what, ">= 50x", f"{ratio:.1f}x", ratio >= 50)
    if not lines:
        size = ",".join(map(str, GOAL_SIZE))
        sys.exit(f"expected a result of size {size}, float32, hot, setting temperature, got none")
    return goals(lines)


def loop_goals(result: dict[str, Any]) -> str:
    lines = []
    for row in result["loop"]["cycle"]:
        share = row["outside_forwards"]
        what = f"{row['drafter']}, outside the forwards"
        lines.append((what, "<= 3 % of a cycle", f"{share:.1%}", share <= 0.03))
    return goals(lines)


def machine(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items() if v)
    is_busy = result["load"] > 0.5
    busy = " **The machine was busy: do not rely on these figures.**" if is_busy else ""
    return (
        f"`{result['command']}` on {result['cpu']}, {result['device']}, load {result['load']:.1f} "
        f"before the run; {versions}; {result['blas']}.{busy}"
    )


def main(*paths: str) -> None:
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    page = PAGE.read_text(encoding="utf-8")
    sections = {}
    levels = {"operation": (operation, operation_goals), "loop": (loop, cycle, loop_goals)}
    for result in results:
        for level, tables in levels.items():
            if level in result:
                if reason := result[level]["stopped"]:
                    sys.exit(f"expected a whole result, got one that ended early: {reason}")
                sections[f"{level} machine"] = machine(result)
                sections |= {make.__name__.replace("_", " "): make(result) for make in tables}
    for name, text in sections.items():
        pattern = rf"(<!-- {name} -->\n).*?\n?(<!-- end -->)"
        page, count = re.subn(pattern, lambda m: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)
        if count != 1:
            sys.exit(f"{PAGE.name}: expected one section {name}, got {count}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

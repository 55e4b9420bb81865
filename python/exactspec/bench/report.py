"""Results of ``exactspec bench`` as tables and as plots."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..blas import blas_in_use
from .peers import OURS

PACKAGES = ("exactspec", "mlx", "mlx-lm", "numpy", "torch", "flashspec-asm-kernel", "mtplx")
PLOTTED_SETTING = "temperature"
INTERRUPTED = "interrupted"
# A load average above which a benchmark has neighbours.
MOST_LOAD = 0.5


def about() -> dict[str, Any]:
    """What a result needs to say about where it comes from."""
    return {
        "command": shlex.join(["exactspec", *sys.argv[1:]]),
        "device": f"{mx.default_device()} {mx.device_info().get('device_name', '')}".strip(),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],  # what else was running before
        "system": platform.platform(),
        "python": platform.python_version(),
        "blas": blas_in_use().split(" (")[0],  # without its path
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Tables


def tables(result: dict[str, Any]) -> Iterator[Table | str]:
    """What to print of a result."""
    if "operation" in result and result["operation"]["results"]:
        yield _operation_table(result["operation"]["results"])
        yield from _absent(result["operation"]["results"])
        for limit in result["operation"]["limits"]:
            yield _limit_line(limit)
    if "loop" in result:
        loop = result["loop"]
        yield _loop_table(loop)
        if loop["cycle"]:
            yield _cycle_table(loop["cycle"])
    for name in ("command", "device", "cpu", "system", "python", "blas"):
        yield f"{name}: {result[name]}"
    if result["load"] > MOST_LOAD:
        yield (
            f"[warning] the machine was busy (load {result['load']:.1f}): MLX hands each call to a "
            "thread that then waits for a core, so these times and ratios are not to be relied on"
        )
    yield "versions: " + ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v)


def _operation_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "B, K, V",
        "setting",
        "logits",
        "threads",
        "peer",
        title="verify_draft; ratio: how often its time",
    )
    for column in ("ms", "quartiles", "ratio", "of the limit"):
        table.add_column(column, justify="right")
    table.add_column("verified")
    for row in rows:
        for name, peer in row["peers"].items():
            ours = name == OURS
            low, high = peer["quartiles_ms"]
            logits = f"{row['dtype']}, {'cold' if row['cold'] else 'hot'}"
            threads = "gpu" if row["threads"] is None else str(row["threads"])
            size = ", ".join(map(str, row["size"]))
            case = (size, row["setting"], logits, threads)
            table.add_row(
                *(case if ours else ("",) * 4),
                name,
                f"{peer['median_ms']:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{peer['ratio']:.1f}",
                f"{row['share_of_limit']:.0%}" if ours else "",
                "" if ours else peer["verified"],
                style="bold" if ours else "",
            )
    return table


def _absent(rows: list[dict[str, Any]]) -> Iterator[str]:
    reasons = {}
    for row in rows:
        for name, reason in row["absent"].items():
            reasons.setdefault((name, reason), []).append(row["setting"])
    for (name, reason), settings in reasons.items():
        yield f"not measured: {name}: {reason} ({'; '.join(dict.fromkeys(settings))})"


def _limit_line(limit: dict[str, Any]) -> str:
    where = "gpu" if limit["threads"] is None else f"{limit['threads']} thread(s)"
    parts = [f"{limit['bytes_per_second'] / 1e9:.1f} GB/s read from memory"]
    if limit["exps_per_second"] is not None:
        parts.insert(0, f"{limit['exps_per_second'] / 1e9:.2f} G exponentials/s summed in cache")
    return f"limit, {where}: {', '.join(parts)}; a call on 64 ids takes {limit['call_ms']:.3f} ms"


def _loop_table(loop: dict[str, Any]) -> Table:
    title = f"decode loop: {loop['model']}; draft model: {loop['draft_model']}"
    table = Table("prompt", "temperature", "peer", title=title)
    for column in ("tokens/s", "range", "speed-up", "tokens/cycle", "accepted", "greedy text"):
        table.add_column(column, justify="right")
    for row in loop["results"]:
        table.add_row(
            row["prompt"],
            f"{row['temperature']:g}",
            row["peer"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['slowest']:.1f} to {row['fastest']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['mean_accepted_length']:.2f}",
            "same" if row["same_greedy_text"] else "differs",
        )
    return table


def _cycle_table(cycle: list[dict[str, Any]]) -> Table:
    table = Table("drafter", title="a cycle, ms")
    phases = list(cycle[0]["ms"])
    for column in (*phases, "outside the forwards"):
        table.add_column(column, justify="right")
    for row in cycle:
        table.add_row(
            row["drafter"],
            *(f"{row['ms'][phase]:.2f}" for phase in phases),
            f"{row['outside_forwards']:.1%}",
        )
    return table


# Plots


def import_pyplot() -> Any:
    """``matplotlib.pyplot``, set so that the same result gives the same SVG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "--plots: expected matplotlib, which is not installed: pip install 'exactspec[bench]'"
        ) from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "exactspec", "svg.fonttype": "none", "font.size": 9})
    return plt


def plot(
    result: dict[str, Any], acceptance: list[dict[str, Any]] | None, folder: Path
) -> list[Path]:
    """Draw every plot that the result has rows for, as SVG; returns the files.

    Args:
        result: of ``exactspec bench``.
        acceptance: the rows of ``benchmarks/bench_rules.py --json``.
        folder: made if it is missing.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = import_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    if "operation" in result and (rows := result["operation"]["results"]):
        figures["bench_limit"] = _plot_shares(plt, rows)
        if plain := _plain_rows(rows):
            figures["bench_time"] = _plot_times(plt, plain)
    if "loop" in result and result["loop"]["cycle"]:
        figures["bench_cycle"] = _plot_cycle(plt, result["loop"]["cycle"])
    if acceptance is not None:
        figures["bench_acceptance"] = _plot_acceptance(plt, acceptance)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
    return paths


def _plot_times(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """Time against V, K and B, where the other two are those of most rows."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
    labels = ("B, sequences", "K, draft tokens", "V, vocabulary")
    base = rows[0]["size"]
    for axis, place in zip(axes, (2, 1, 0)):
        fixed = [i for i in range(3) if i != place]
        swept = [row for row in rows if all(row["size"][i] == base[i] for i in fixed)]
        names = dict.fromkeys(name for row in swept for name in row["peers"])
        for name in names:
            points = sorted(
                {
                    row["size"][place]: row["peers"][name]["median_ms"]
                    for row in swept
                    if name in row["peers"]
                }.items()
            )
            style = {"linewidth": 2.5, "color": "black"} if name == OURS else {}
            axis.plot(*zip(*points), marker="o", markersize=3, label=name, **style)
        axis.set(xscale="log", yscale="log", xlabel=labels[place])
        values = sorted({row["size"][place] for row in swept})
        axis.set_xticks(values, [str(v) for v in values], rotation=45)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    threads = rows[0]["threads"]
    where = "GPU" if threads is None else f"{threads} thread(s)"
    figure.suptitle(f"{PLOTTED_SETTING}, dense draft, float32, hot, {where}")
    return figure


def _plain_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the plotted setting in float32 and hot, of the first number of threads."""
    rows = [row for row in rows if row["setting"] == PLOTTED_SETTING]
    rows = [row for row in rows if row["dtype"] == "float32" and not row["cold"]]
    return [row for row in rows if row["threads"] == rows[0]["threads"]]


def _plot_shares(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """Share of the limit, a bar for each number of threads; of the first row's dtype and cache."""
    rows = [r for r in rows if (r["dtype"], r["cold"]) == (rows[0]["dtype"], rows[0]["cold"])]
    labels = list(dict.fromkeys(_size_and_setting(row) for row in rows))
    threads = list(dict.fromkeys(row["threads"] for row in rows))
    figure, axis = plt.subplots(figsize=(8, 1 + 0.3 * len(labels)))
    height = 0.8 / len(threads)
    for index, count in enumerate(threads):
        of_count = [row for row in rows if row["threads"] == count]
        at = [labels.index(_size_and_setting(row)) + index * height for row in of_count]
        shares = [100 * row["share_of_limit"] for row in of_count]
        label = "gpu" if count is None else f"{count} thread{'s' * (count > 1)}"
        axis.barh(at, shares, height, align="edge", label=label)
    axis.axvline(100, color="black", linewidth=1)
    axis.set_xlabel("% of the limit measured in the same run")
    axis.set_yticks([i + 0.4 for i in range(len(labels))], labels)
    axis.set_ylim(len(labels), -0.2)
    axis.grid(axis="x", alpha=0.3)
    axis.set_title(f"{rows[0]['dtype']}, {'cold' if rows[0]['cold'] else 'hot'}")
    axis.legend(loc="lower right")
    return figure


def _size_and_setting(row: dict[str, Any]) -> str:
    return f"({', '.join(map(str, row['size']))}) {row['setting']}"


def _plot_cycle(plt: Any, cycle: list[dict[str, Any]]) -> Any:
    """Where the time of a cycle goes, for each drafter; from 0 to 100 %."""
    figure, axis = plt.subplots(figsize=(9, 1 + 0.5 * len(cycle)))
    labels = [f"{row['drafter']}\n{sum(row['ms'].values()):.1f} ms" for row in cycle]
    left = [0.0] * len(cycle)
    for phase in cycle[0]["ms"]:
        widths = [100 * row["ms"][phase] / sum(row["ms"].values()) for row in cycle]
        axis.barh(labels, widths, left=left, label=phase, edgecolor="white", linewidth=0.5)
        left = [a + b for a, b in zip(left, widths)]
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="% of a cycle")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncol=len(cycle[0]["ms"]), fontsize=8)
    return figure


def _plot_acceptance(plt: Any, rows: list[dict[str, Any]]) -> Any:
    """Mean accepted length against temperature with its intervals, one panel per drafter.

    A hollow mark cannot be told from the token rule's.
    """
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    figure, axes = plt.subplots(
        1, len(drafters), figsize=(3 * len(drafters), 3.5), sharey=True, squeeze=False
    )
    colours = {rule: f"C{i}" for i, rule in enumerate(dict.fromkeys(r["rule"] for r in rows))}
    for axis, drafter in zip(axes[0], drafters):
        for rule, colour in colours.items():
            points = sorted(
                (row for row in rows if row["drafter"] == drafter and row["rule"] == rule),
                key=lambda row: row["temperature"],
            )
            x = [row["temperature"] for row in points]
            y = [row["mean_accepted_length"] for row in points]
            halves = [
                row["mean_accepted_length"] - row["interval"][0] if row["interval"] else 0.0
                for row in points
            ]
            axis.errorbar(x, y, halves, color=colour, elinewidth=0.7, capsize=2)
            for noisy, face in ((False, colour), (True, "white")):
                marks = [i for i, row in enumerate(points) if bool(row["within_noise"]) == noisy]
                axis.plot(
                    *([values[i] for i in marks] for values in (x, y)),
                    *("o",),
                    **{"markersize": 4, "color": colour, "markerfacecolor": face, "zorder": 3},
                )
        axis.set(title=drafter, xlabel="temperature")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean accepted length")
    handles = [plt.Line2D([], [], color=c, marker="o", markersize=3) for c in colours.values()]
    handles.append(plt.Line2D([], [], color="grey", marker="o", markerfacecolor="white", ls=""))
    labels = [*colours, "not told from token"]
    axes[0][-1].legend(handles, labels, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return figure

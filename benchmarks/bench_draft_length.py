"""The adaptive draft length against fixed ones, all with prompt lookup.

    python benchmarks/bench_draft_length.py [--model M] [--num-draft-tokens 8] [--rounds N] [--json]

Greedy texts are compared before anything is timed. Then the drafters take turns in one process,
each once per round with the round's seed; the table has the median over the rounds. ``--cpu-time``
counts the time of this process alone, for a busy machine and models on the CPU.
"""

from __future__ import annotations

# ruff: noqa: E402
# OpenBLAS has to be in front before MLX is imported.
from exactspec_openblas import use_openblas

use_openblas()

import argparse
import json
import shlex
import statistics
import sys
import time
from types import SimpleNamespace

from exactspec import Sampling
from exactspec import generate as generate_module
from exactspec.bench.loop import PROMPTS
from exactspec.bench.report import about
from exactspec.drafters import Adaptive, Drafter, PromptLookup
from exactspec.generate import generate
from exactspec.models import DEFAULT_MODEL, load
from rich.console import Console
from rich.table import Table


def make_drafters(most: int) -> dict[str, Drafter | None]:
    lengths = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    drafters = {"plain": None} | {f"lookup {length}": PromptLookup(length) for length in lengths}
    return drafters | {"adaptive": Adaptive(PromptLookup(most))}


def measure(model, tokenizer, prompt, drafters, temperature, options) -> list[dict]:
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def run(name, temperature, seed):
        return generate(
            model,
            tokenizer,
            ids,
            drafter=drafters[name],
            sampling=Sampling(temperature=temperature),
            max_tokens=options.max_tokens,
            seed=seed,
        )

    # Also the warm-up.
    greedy = {name: run(name, 0, 0).tokens for name in drafters}
    runs = {name: [] for name in drafters}
    for seed in range(options.rounds):
        # Whoever comes first in a round comes last in the next.
        names = list(drafters)
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            runs[name].append(run(name, temperature, seed).statistics)
    all_speeds = {name: [run.tokens_per_second for run in runs[name]] for name in drafters}
    medians = {name: statistics.median(speeds) for name, speeds in all_speeds.items()}
    best = max(drafters, key=lambda name: name != "adaptive" and medians[name])
    rows = []
    for name, speeds in all_speeds.items():
        rows.append(
            {
                "drafter": name,
                "tokens_per_second": medians[name],
                "slowest": min(speeds),
                "fastest": max(speeds),
                "speedup": median_ratio(speeds, all_speeds["plain"]),
                "of_best_fixed": median_ratio(speeds, all_speeds[best]),
                "tokens_per_cycle": statistics.fmean(r.tokens_per_cycle for r in runs[name]),
                "acceptance_rate": statistics.fmean(r.acceptance_rate for r in runs[name]),
                "tokens": sum(run.generated_tokens for run in runs[name]),
                "same_greedy_text": greedy[name] == greedy["plain"],
            }
        )
    return rows


def median_ratio(speeds: list[float], peers: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(speeds, peers))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help=f"default: {DEFAULT_MODEL.name}")
    parser.add_argument("--num-draft-tokens", type=int, default=8, help="the most")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="instead of the time on the wall")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.cpu_time:
        # Statistics and the adaptive draft length both see the loop's clock.
        generate_module.time = SimpleNamespace(perf_counter=time.process_time)

    model, tokenizer = load(options.model)
    result = {
        **about(),
        "command": shlex.join(["python", *sys.argv]),
        "model": options.model or DEFAULT_MODEL.name,
        "rounds": options.rounds,
        "results": [],
    }
    for name, prompt in PROMPTS.items():
        for temperature in (0.0, 0.7):
            drafters = make_drafters(options.num_draft_tokens)
            rows = measure(model, tokenizer, prompt, drafters, temperature, options)
            result["results"] += [
                {"prompt": name, "temperature": temperature, **row} for row in rows
            ]
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


def show(result: dict) -> None:
    table = Table(title=f"{result['model']}, {result['cpu']}, {result['blas']}")
    for column in ("prompt", "temperature", "drafter"):
        table.add_column(column)
    numbers = ("tokens/s", "range", "speedup", "of best", "tokens/cycle", "accepted", "greedy text")
    for column in numbers:
        table.add_column(column, justify="right")
    for row in result["results"]:
        table.add_row(
            row["prompt"],
            f"{row['temperature']:g}",
            row["drafter"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['slowest']:.1f} to {row['fastest']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['of_best_fixed']:.2f}",
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            "same" if row["same_greedy_text"] else "differs",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


if __name__ == "__main__":
    main()

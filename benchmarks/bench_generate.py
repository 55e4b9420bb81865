"""Plain decoding against drafting, on three prompts: one to copy, one to edit, one without help.

    python benchmarks/bench_generate.py [--model M] [--draft-model M] [--rounds N] [--json]
    python benchmarks/bench_generate.py --adaptive [--num-draft-tokens 8]

Greedy texts are compared before anything is timed. Then the drafters take turns in one process,
each once per round with the round's seed; the table has the median over the rounds.

``--adaptive`` compares the adaptive draft length with fixed ones instead, all with prompt lookup.
``--cpu-time`` counts the time of this process alone, for a busy machine and models on the CPU.
"""

from __future__ import annotations

# ruff: noqa: E402
# OpenBLAS has to be in front before MLX is imported.
from exactspec_openblas import use_openblas

use_openblas()

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from importlib.metadata import version
from importlib.resources import files
from types import SimpleNamespace

from exactspec import Sampling
from exactspec import generate as generate_module
from exactspec.blas import blas_in_use
from exactspec.drafters import Adaptive, Drafter, DraftModel, PromptLookup
from exactspec.generate import generate
from exactspec.models import DEFAULT_MODEL, load
from rich.console import Console
from rich.table import Table

CODE = '''Rename the variable `x` to `total` in this Python code. Show the whole code.

```python
def summarise(orders):
    """Add up the orders and report the largest one."""
    x = 0
    largest = None
    for order in orders:
        x = x + order.price * order.quantity
        if largest is None or order.price > largest.price:
            largest = order
    print("Number of orders:", len(orders))
    print("Largest order:", largest)
    print("Total:", x)
    return x
```'''

PROMPTS = {
    "copy": files("exactspec").joinpath("data/prompt.txt").read_text(encoding="utf-8"),
    "edit": CODE,
    # Nothing to look up: what drafting costs where it cannot help.
    "story": "Write a short story about a lighthouse keeper.",
}


def cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def make_drafters(options, draft_model) -> dict[str, Drafter | None]:
    most = options.num_draft_tokens
    drafters = {"plain": None}
    if options.adaptive:
        lengths = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
        drafters |= {f"lookup {length}": PromptLookup(length) for length in lengths}
        drafters["adaptive"] = Adaptive(PromptLookup(most))
    else:
        drafters["prompt lookup"] = PromptLookup(most)
        if draft_model:
            drafters["draft model"] = DraftModel(*draft_model, most)
    return drafters


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
    parser.add_argument("--draft-model", help="also draft with this model")
    parser.add_argument("--num-draft-tokens", type=int, help="default: 4, with --adaptive 8")
    parser.add_argument("--adaptive", action="store_true", help="compare draft lengths instead")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="instead of the time on the wall")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.num_draft_tokens is None:
        options.num_draft_tokens = 8 if options.adaptive else 4

    if options.cpu_time:
        # Statistics and the adaptive draft length both see the loop's clock.
        generate_module.time = SimpleNamespace(perf_counter=time.process_time)

    model, tokenizer = load(options.model)
    draft_model = load(options.draft_model) if options.draft_model else None
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "model": options.model or DEFAULT_MODEL.name,
        "cpu": cpu_name(),
        "blas": blas_in_use().split(" (")[0],  # without its path
        "versions": {name: version(name) for name in ("exactspec", "mlx", "mlx-lm")},
        "rounds": options.rounds,
        "results": [],
    }
    for name, prompt in PROMPTS.items():
        for temperature in (0.0, 0.7):
            drafters = make_drafters(options, draft_model)
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

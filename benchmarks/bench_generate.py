"""Plain decoding against drafting, on three prompts: one to copy, one to edit, one without help.

    python benchmarks/bench_generate.py [--model M] [--draft-model M] [--rounds N] [--json]

Greedy texts are compared before anything is timed. Then the drafters take turns in one process,
each once per round with the round's seed; the table has the median over the rounds.
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
from importlib.metadata import version
from importlib.resources import files

from exactspec import Sampling
from exactspec.blas import blas_in_use
from exactspec.drafters import DraftModel, PromptLookup
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
        for name in drafters:
            runs[name].append(run(name, temperature, seed).statistics)
    rows = []
    for name in drafters:
        speeds = [run.tokens_per_second for run in runs[name]]
        plain_speeds = [run.tokens_per_second for run in runs["plain"]]
        rows.append(
            {
                "drafter": name,
                "tokens_per_second": statistics.median(speeds),
                "slowest": min(speeds),
                "fastest": max(speeds),
                "speedup": statistics.median(a / b for a, b in zip(speeds, plain_speeds)),
                "tokens_per_cycle": statistics.fmean(r.tokens_per_cycle for r in runs[name]),
                "acceptance_rate": statistics.fmean(r.acceptance_rate for r in runs[name]),
                "tokens": sum(run.generated_tokens for run in runs[name]),
                "same_greedy_text": greedy[name] == greedy["plain"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help=f"default: {DEFAULT_MODEL.name}")
    parser.add_argument("--draft-model", help="also draft with this model")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()

    model, tokenizer = load(options.model)
    drafters = {"plain": None, "prompt lookup": PromptLookup(options.num_draft_tokens)}
    if options.draft_model:
        drafters["draft model"] = DraftModel(*load(options.draft_model), options.num_draft_tokens)
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
    for column in ("tokens/s", "range", "speedup", "tokens/cycle", "accepted", "greedy text"):
        table.add_column(column, justify="right")
    for row in result["results"]:
        table.add_row(
            row["prompt"],
            f"{row['temperature']:g}",
            row["drafter"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['slowest']:.1f} to {row['fastest']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['tokens_per_cycle']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            "same" if row["same_greedy_text"] else "differs",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


if __name__ == "__main__":
    main()

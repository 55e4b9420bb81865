"""verify_draft against the same law composed of mx operations: verify, then time.

All peers get the same inputs, must agree on the tokens, and alternate in one process; inputs rotate
so that no branch is learnt. The result is a ratio: machines are shared and noisy.

    python benchmarks/bench_verify_draft.py [--json] [--rounds 15]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer
from exactspec import Sampling, reference, sample, verify_draft
from rich.console import Console
from rich.table import Table

SIZES = [(1, 4, 49152), (1, 4, 152064), (8, 4, 152064)]
TEMPERATURE = Sampling(0.6)
SETTINGS: dict[str, tuple[Sampling, str]] = {
    "temperature, dense draft": (TEMPERATURE, "dense"),
    "temperature, dense draft with stats": (TEMPERATURE, "stats"),
    "temperature, one-hot draft": (TEMPERATURE, "one-hot"),
    "top_k 20 + top_p 0.95, dense draft": (Sampling(0.6, top_k=20, top_p=0.95), "dense"),
}
NUM_INPUTS = 4


def make_inputs(seed: int, size: tuple[int, int, int], sampling: Sampling, kind: str) -> dict:
    """Synthetic logits and a draft close to them, rejected at slot K / 2.

    The slots before it hold the target's best token and a coin of 0; slot K / 2 holds a token that
    only the draft likes. What is read depends on where the rejection is, so it is the same for all.
    """
    batch, num_slots, vocab_size = size
    half = num_slots // 2
    keys = mx.random.split(mx.random.key(seed), 5)
    target = 2 * mx.random.normal((batch, num_slots + 1, vocab_size), key=keys[0])
    noise = mx.random.normal((batch, num_slots, vocab_size), key=keys[1])
    draft = target[:, :num_slots] + 0.3 * noise
    tokens = mx.argmax(target[:, :num_slots], axis=-1).astype(mx.int32)
    unlikely = mx.random.randint(0, vocab_size, (batch,), key=keys[2])
    tokens[:, half] = unlikely
    draft[mx.arange(batch), half, unlikely] = mx.max(draft[:, half], axis=-1) + 1
    uniforms = mx.random.uniform(shape=(batch, num_slots + 2), key=keys[3])
    uniforms[:, :half] = 0.0
    uniforms[:, half] = 0.999
    inputs = {"target_logits": target, "draft_tokens": tokens, "uniforms": uniforms}
    if kind != "one-hot":
        inputs["draft_logits"] = draft
    if kind == "stats":
        rows = draft.reshape(-1, vocab_size)
        row_stats = sample(rows, sampling, keys=mx.random.split(keys[4], len(rows))).row_stats
        inputs["draft_stats"] = row_stats.reshape(batch, num_slots, 4)
    mx.eval(inputs)
    return inputs


def make_peers(sampling: Sampling) -> dict[str, Callable[[dict], tuple]]:
    """Functions from inputs to (tokens, num_accepted)."""

    def composed(inputs: dict) -> tuple:
        return reference.verify_draft(**inputs, sampling=sampling)[:2]

    return {
        "verify_draft": lambda inputs: verify_draft(**inputs, sampling=sampling)[:2],
        "composed, eager": composed,
        "composed, mx.compile": mx.compile(composed),
    }


def measure(size: tuple[int, int, int], name: str, rounds: int) -> dict[str, Any]:
    """Median seconds and spread of every peer on one size and setting."""
    sampling, kind = SETTINGS[name]
    inputs = [make_inputs(seed, size, sampling, kind) for seed in range(NUM_INPUTS)]
    peers = make_peers(sampling)
    for x in inputs:
        results = {peer: fn(x) for peer, fn in peers.items()}
        mx.eval(results)
        ours = results["verify_draft"]
        if ours[1].tolist() != [size[1] // 2] * size[0]:
            sys.exit(f"{size}, {name}: the rejection is not at slot K / 2; nothing was timed")
        for peer, theirs in results.items():
            if not mx.array_equal(ours[0], theirs[0]).item():
                sys.exit(f"{size}, {name}: {peer} emits other tokens; nothing was timed")
    times: dict[str, list[float]] = {peer: [] for peer in peers}
    for i in range(rounds):
        for peer, fn in peers.items():
            start = time.perf_counter()
            mx.eval(fn(inputs[i % NUM_INPUTS]))
            times[peer].append(time.perf_counter() - start)
    medians = {peer: statistics.median(t) for peer, t in times.items()}
    return {
        "size": size,
        "setting": name,
        "num_accepted": size[1] // 2,
        "median_ms": {peer: 1e3 * m for peer, m in medians.items()},
        "quartiles_ms": {
            peer: [1e3 * q for q in statistics.quantiles(t, n=4)[::2]] for peer, t in times.items()
        },
        "ratio": {peer: m / medians["verify_draft"] for peer, m in medians.items()},
    }


def cpu_name() -> str:
    """Model and number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main(
    rounds: Annotated[int, typer.Option(help="Timed calls of each peer.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Time verify_draft beside the composed reference."""
    about = {
        "command": "python " + " ".join(sys.argv),
        "exactspec": version("exactspec"),
        "mlx": mx.__version__,
        "python": platform.python_version(),
        "device": str(mx.default_device()),
        "cpu": cpu_name(),
        "system": platform.platform(),
    }
    results = [measure(size, name, rounds) for size in SIZES for name in SETTINGS]
    if as_json:
        print(json.dumps({**about, "results": results}))
        return
    table = Table("B, K, V", "setting", "accepted", "peer", "ms", "quartiles", "ratio")
    for r in results:
        for peer, ms in r["median_ms"].items():
            low, high = r["quartiles_ms"][peer]
            first = peer == "verify_draft"
            table.add_row(
                str(r["size"]) if first else "",
                r["setting"] if first else "",
                str(r["num_accepted"]) if first else "",
                peer,
                f"{ms:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{r['ratio'][peer]:.1f}",
            )
    console = Console(width=130)
    console.print(table)
    console.print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")


if __name__ == "__main__":
    typer.run(main)

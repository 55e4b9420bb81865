"""The default model's draft head on prompts that its training never saw.

    python benchmarks/bench_head.py RESULT.json [--parts rules speed split] [--drafters NAME ...]
        [--every N] [--rounds N] [--max-tokens N] [--head FILE] [--plots FOLDER]

Every measurement is a text: of a prompt, at a temperature, with a drafter and a rule. They are
added to RESULT.json one prompt after the other, and what is there already is not measured again, so
a run may be stopped and goes on later, with the same head and --max-tokens; the tables and the
plots show what is there. With --parts and nothing behind it nothing is measured.

rules: mean accepted length of every rule, and the acceptance of each depth.
speed: tokens per second of --drafters (default: all) beside plain decoding. With each prompt and
    round another one comes first. Adaptive ones learn on across texts and temperatures.
split: the share of drafting, of the target and of verification.

"match" is the rule of mlx-lm's ``speculative_generate_step``: accept while the draft is what the
target draws on its own, that is, with the target's probability, whatever the draft's.
"""

from __future__ import annotations

# ruff: noqa: E402
# OpenBLAS has to be in front before MLX is imported.
from exactspec_openblas import use_openblas

use_openblas()

import argparse
import hashlib
import json
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from exactspec import Sampling
from exactspec.bench.report import about, import_pyplot
from exactspec.drafters import Adaptive, Draft, Drafter, Hybrid, MTPDrafter, PromptLookup
from exactspec.generate import generate
from exactspec.heads import DEFAULT_HEAD, DraftHead
from exactspec.models import load_default_model
from rich.console import Console
from rich.progress import track
from rich.table import Table

HELD_OUT = Path(__file__).parents[1] / "training" / "held_out.json"
TEMPERATURES = (0.0, 0.7, 1.0)
PARTS = ("rules", "speed", "split")
RULES = ("match", "token", "block", "coupled")
DEPTH = 4
PLAIN = "plain"


class Match(MTPDrafter):
    """Keeps the distribution of its drafts to itself: they are accepted as certain ones are."""

    def draft(self, limit, key):
        return Draft(super().draft(limit, key).draft_tokens)


class Case(NamedTuple):
    """What to measure, for each prompt."""

    part: str
    temperature: float
    drafter: str
    rule: str
    seed: int


def make_drafters(head: DraftHead) -> dict[str, Drafter | None]:
    fixed = {f"head {count}": MTPDrafter(head, count) for count in range(1, DEPTH + 1)}
    return {
        PLAIN: None,
        **fixed,
        "head, adaptive": Adaptive(MTPDrafter(head, DEPTH)),
        "lookup, head 1": Hybrid(PromptLookup(4, min_ngram=3), MTPDrafter(head, 1)),
        "lookup, head, adaptive": Hybrid(
            PromptLookup(4, min_ngram=3), Adaptive(MTPDrafter(head, DEPTH))
        ),
        "match": Match(head, DEPTH),
    }


def cases(parts: list[str], timed: list[str], rounds: int, prompt: int) -> Iterator[Case]:
    """What to measure of the prompt with that number; ``timed`` are the drafters of speed."""
    for part in parts:
        for temperature in TEMPERATURES:
            for seed in range(1 if part == "split" else rounds):
                if part == "rules":
                    for rule in RULES if temperature else ("token",):
                        drafter = "match" if rule == "match" else f"head {DEPTH}"
                        yield Case(part, temperature, drafter, rule, seed)
                elif part == "speed":
                    turn = (prompt + seed) % len(timed)
                    for name in timed[turn:] + timed[:turn]:
                        yield Case(part, temperature, name, "token", seed)
                else:
                    for name in (PLAIN, "head 2", "lookup, head 1"):
                        yield Case(part, temperature, name, "token", seed)


def measure(model, tokenizer, drafters, prompt: str, case: Case, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    start = time.perf_counter()
    text = generate(
        model,
        tokenizer,
        ids,
        drafter=drafters[case.drafter],
        sampling=Sampling(case.temperature),
        rule="token" if case.rule == "match" else case.rule,
        max_tokens=max_tokens,
        seed=case.seed,
        profile=case.part == "split",
    )
    seconds = time.perf_counter() - start
    done = text.statistics
    phases = {"draft": done.draft_time, "target": done.target_time, "verify": done.verify_time}
    return {
        **case._asdict(),
        "tokens": done.generated_tokens,
        "cycles": done.cycles,
        "seconds": seconds,
        "prompt_seconds": done.prompt_time,
        "slot_reached": done.slot_reached,
        "slot_accepted": done.slot_accepted,
        **({"phases": phases} if case.part == "split" else {}),
        **({"text": text.tokens} if case.temperature == 0 else {}),
    }


def open_result(path: Path, max_tokens: int, head: Path) -> dict[str, Any]:
    """The result in the file, which must be of the same settings, or a new one."""
    digest = hashlib.sha256(head.read_bytes()).hexdigest()
    settings = {"max-tokens": max_tokens, "head": f"sha256:{digest}"}
    if not path.exists():
        return {"settings": settings, "sessions": [], "runs": []}
    result = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if (before := result.get("settings", {}).get(name)) != value:
            raise SystemExit(f"--{name}: expected {before}, as in {path}, got {value}")
    return result


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Whenever it is stopped, the file is whole."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(result), encoding="utf-8")
    beside.replace(path)


def run(options) -> dict[str, Any]:
    """Measure what is missing; the result so far is in the file after every prompt."""
    model, tokenizer = load_default_model()
    drafters = make_drafters(DraftHead.load(options.head, model))
    timed = [name for name in drafters if name != "match"]
    if options.drafters is not None:
        for name in options.drafters:
            if name not in timed:
                raise SystemExit(f"--drafters: expected some of {timed}, got {name!r}")
        timed = [name for name in timed if name in (PLAIN, *options.drafters)]
    result = open_result(options.result, options.max_tokens, options.head)
    command = shlex.join(["python", *sys.argv])
    result["sessions"].append({**about(), "command": command})
    prompts = json.loads(HELD_OUT.read_text(encoding="utf-8"))[:: options.every]
    known = {(row["prompt"], *(row[name] for name in Case._fields)) for row in result["runs"]}
    warm_up = Case("speed", 0.0, f"head {DEPTH}", "token", 0)
    measure(model, tokenizer, drafters, prompts[0]["prompt"], warm_up, 8)
    for number, row in enumerate(track(prompts, console=Console(stderr=True))):
        for case in cases(options.parts, timed, options.rounds, number):
            if (row["prompt"], *case) not in known:
                new = measure(model, tokenizer, drafters, row["prompt"], case, options.max_tokens)
                result["runs"].append({"prompt": row["prompt"], "kind": row["kind"], **new})
        save_result(options.result, result)
    return result


def grouped(runs: list[dict], *names: str) -> dict[Any, list[dict]]:
    groups = defaultdict(list)
    for row in runs:
        groups[tuple(row[name] for name in names)].append(row)
    return dict(groups)


def depth_acceptance(runs: list[dict]) -> list[float]:
    """Of the drafts of each depth whose predecessors were accepted, how many were, too."""
    rates = []
    for depth in range(DEPTH):
        reached, accepted = (
            sum(sum(row[name][depth : depth + 1]) for row in runs)
            for name in ("slot_reached", "slot_accepted")
        )
        rates.append(accepted / reached if reached else 0.0)
    return rates


def accepted_length(runs: list[dict]) -> float:
    return sum(sum(row["slot_accepted"]) for row in runs) / sum(row["cycles"] for row in runs)


def speeds(runs: list[dict]) -> dict[tuple[float, str], dict[str, float]]:
    """By temperature and drafter; speed-ups are of each prompt, over all of its rounds."""
    pace = {}
    for key, rows in grouped(runs, "temperature", "drafter", "prompt").items():
        tokens = sum(row["tokens"] for row in rows)
        whole = sum(row["seconds"] for row in rows)
        pace[key] = tokens / (whole - sum(row["prompt_seconds"] for row in rows)), tokens / whole
    result = {}
    for (temperature, drafter), rows in grouped(runs, "temperature", "drafter").items():
        prompts = [key for key in pace if key[:2] == (temperature, drafter)]
        base = [(temperature, PLAIN, prompt) for _, _, prompt in prompts]
        ratios = [pace[key][0] / pace[plain][0] for key, plain in zip(prompts, base)]
        whole = [pace[key][1] / pace[plain][1] for key, plain in zip(prompts, base)]
        result[temperature, drafter] = {
            "tokens_per_second": statistics.fmean(pace[key][0] for key in prompts),
            "speedup": statistics.fmean(ratios),
            "least": min(ratios),
            "end_to_end": statistics.fmean(whole),
            "tokens_per_cycle": sum(r["tokens"] for r in rows) / sum(r["cycles"] for r in rows),
        }
    return result


def tables(result: dict[str, Any]) -> Iterator[Table]:
    parts = grouped(result["runs"], "part")
    if rules := parts.get(("rules",)):
        token = [row for row in rules if row["rule"] == "token"]
        table = Table("T", "kind", *(f"depth {d + 1}" for d in range(DEPTH)), title="acceptance")
        for (temperature,), rows in grouped(token, "temperature").items():
            kinds = {"all": rows} | {k: r for (k,), r in grouped(rows, "kind").items()}
            for kind, of_kind in kinds.items():
                rates = depth_acceptance(of_kind)
                table.add_row(f"{temperature:g}", kind, *(f"{rate:.2f}" for rate in rates))
        yield table
        table = Table("T", *RULES, title=f"mean accepted length, {DEPTH} drafts")
        for temperature in TEMPERATURES:
            lengths = []
            for rule in RULES:
                rows = [r for r in rules if (r["temperature"], r["rule"]) == (temperature, rule)]
                lengths.append(f"{accepted_length(rows):.2f}" if rows else "")
            table.add_row(f"{temperature:g}", *lengths)
        yield table
    if timed := parts.get(("speed",)):
        columns = ("tokens/s", "speed-up", "least", "with prompt", "tokens/cycle")
        table = Table("T", "drafter", *columns, title="speed beside plain decoding")
        for (temperature, drafter), row in speeds(timed).items():
            table.add_row(f"{temperature:g}", drafter, *(f"{value:.2f}" for value in row.values()))
        yield table
        same = defaultdict(lambda: [0, 0])
        texts = [row for row in timed if row["temperature"] == 0]
        plain = {row["prompt"]: row["text"] for row in texts if row["drafter"] == PLAIN}
        for row in texts:
            same[row["drafter"]][0] += row["text"] == plain[row["prompt"]]
            same[row["drafter"]][1] += 1
        table = Table("drafter", "the text of plain decoding at T = 0")
        for drafter, (equal, of) in same.items():
            table.add_row(drafter, f"{equal} of {of}")
        yield table
    if profiled := parts.get(("split",)):
        table = Table("T", "drafter", "draft", "target", "verify", title="share of a cycle's time")
        for (temperature, drafter), rows in grouped(profiled, "temperature", "drafter").items():
            sums = [sum(row["phases"][phase] for row in rows) for phase in rows[0]["phases"]]
            shares = [f"{value / sum(sums):.1%}" for value in sums]
            table.add_row(f"{temperature:g}", drafter, *shares)
        yield table


def plot(result: dict[str, Any], folder: Path) -> None:
    """Draw acceptance by depth, and speed against the number of drafts, as SVG."""
    plt = import_pyplot()
    parts = grouped(result["runs"], "part")
    figures = {}
    if rules := parts.get(("rules",)):
        figures["head_acceptance"], axis = plt.subplots(figsize=(5, 3.5))
        token = [row for row in rules if row["rule"] == "token"]
        for (temperature,), rows in grouped(token, "temperature").items():
            depths = range(1, DEPTH + 1)
            axis.plot(depths, depth_acceptance(rows), marker="o", label=f"T = {temperature:g}")
        axis.set(xlabel="depth of the draft", ylabel="acceptance, all before accepted", ylim=(0, 1))
        axis.set_xticks(range(1, DEPTH + 1))
        axis.grid(alpha=0.3)
        axis.legend()
    if timed := parts.get(("speed",)):
        figures["head_speed"], axis = plt.subplots(figsize=(5, 3.5))
        names = [PLAIN, *(f"head {count}" for count in range(1, DEPTH + 1))]
        by_drafter = speeds(timed)
        for index, temperature in enumerate(TEMPERATURES):
            points = [by_drafter.get((temperature, name)) for name in names]
            heights = [point["tokens_per_second"] if point else None for point in points]
            axis.plot(range(DEPTH + 1), heights, marker="o", label=f"T = {temperature:g}")
            adaptive = by_drafter.get((temperature, "head, adaptive"))
            if adaptive:
                style = {"linestyle": ":", "color": f"C{index}"}
                axis.axhline(adaptive["tokens_per_second"], **style)
        if any(drafter == "head, adaptive" for _, drafter in by_drafter):
            axis.plot([], [], linestyle=":", color="grey", label="adaptive")
        axis.set(xlabel="drafts per cycle (0: plain decoding)", ylabel="tokens per second")
        axis.set_ylim(0)
        axis.set_xticks(range(DEPTH + 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path, help="JSON, made or gone on with")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--drafters", nargs="+", metavar="NAME", help="those to time")
    parser.add_argument("--every", type=int, default=1, help="every Nth prompt; default: all")
    parser.add_argument("--rounds", type=int, default=1, help="texts of each, with other seeds")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--head", type=Path, default=DEFAULT_HEAD, help="default: the packaged one")
    parser.add_argument("--plots", type=Path, help="folder for SVG files")
    options = parser.parse_args(arguments)
    if options.plots is not None:
        try:
            import_pyplot()  # before the measurements, which take long
        except ImportError as error:
            parser.error(str(error))
    if options.parts:
        result = run(options)
    else:
        result = json.loads(options.result.read_text(encoding="utf-8"))
    for table in tables(result):
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.plots is not None:
        plot(result, options.plots)


if __name__ == "__main__":
    main()

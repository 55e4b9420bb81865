"""Mean accepted length of every rule on the same drafts of a real model.

    python benchmarks/bench_rules.py [--contexts N] [--drafts N] [--num-draft-tokens K] [--seed S]
        [--rules RULE ...] [--drafters DRAFTER ...] [--temperatures T ...] [--json]

Contexts are places in texts that the target wrote, spread over the prompts. At each, a drafter
proposes K tokens and the target reads them once; then every rule judges the same draft and the same
rows, many times with other noise. (Drafts for coupled noise are made with that noise, so they are
others of the same distribution, judged once; a tree has more tokens.) The copies are the target
itself with weights rounded to a few bits. "match" is the rule of mlx-lm's
``speculative_generate_step``: accept while the draft is what the target draws on its own, that is,
with the target's probability, whatever the draft's.

Intervals are of 95 %, from the means of the contexts by Student's t: drafts in one context are not
independent. "~" marks a length that cannot be told from the token rule's on the same contexts.
``exactspec bench --acceptance`` draws the result of ``--json``.
"""

from __future__ import annotations

# ruff: noqa: E402
# OpenBLAS has to be in front before MLX is imported.
from exactspec_openblas import use_openblas

use_openblas()

import argparse
import itertools
import json
import math
import shlex
import sys
from collections import defaultdict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from exactspec import Cascade, Sampling, Typical, verify_draft, verify_tree
from exactspec.bench.loop import PROMPTS, rounded
from exactspec.cached_model import CachedModel
from exactspec.drafters import DraftModel, DraftTree, PromptLookup
from exactspec.generate import generate
from exactspec.models import DEFAULT_MODEL, load
from mlx_lm.models.cache import KVCache
from rich.console import Console
from rich.progress import track
from rich.table import Table

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
# By the name to choose it by: the name to show, and the rule.
RULES = {
    "match": ("match (mlx-lm)", "match"),
    "token": ("token", "token"),
    "block": ("block", "block"),
    "coupled": ("coupled", "coupled"),
    "typical": ("typical (lossy)", Typical()),
    "cascade": ("cascade 0.1 (lossy)", Cascade(0.1)),
}
WIDTHS = (3, 2, 1, 1)
BITS = (4, 3)
DRAFTERS = {
    "lookup": "prompt lookup",
    **{f"{bits}-bit": f"{bits}-bit copy" for bits in BITS},
    **{f"{bits}-bit-tree": f"{bits}-bit copy, tree" for bits in BITS},
}
NUM_TRIALS = 64
CONFIDENCE = 0.95


def prefilled(model: nn.Module, context: list[int]) -> list[KVCache]:
    """A cache of the context but for its last token."""
    holder = CachedModel(model)
    holder.settle(context, 0)
    holder.prefill()
    return holder.cache


def cloned(cache: list[KVCache]) -> list[KVCache]:
    copies = [KVCache() for _ in cache]
    for new, old in zip(copies, cache):
        new.state = (mx.array(old.keys), mx.array(old.values), old.offset)
    return copies


def accepted(logits, draft, sampling, rule, key: mx.array, position: int) -> float:
    """Mean accepted length over NUM_TRIALS keys, or with the one key that coupled drafts have."""
    if rule == "coupled":
        at = mx.array(position, mx.int32)
        result = verify_draft(logits, draft.draft_tokens, sampling=sampling, rule=rule,
                              keys=key, positions=at)  # fmt: skip
        return result.num_accepted.item()

    def repeated(x):
        return None if x is None else mx.broadcast_to(x, (NUM_TRIALS, *x.shape))

    # One-hot drafts are accepted with the target's probability: that is the match rule.
    rows = rule != "match" and draft.draft_logits is not None
    options = {
        "draft_logits": repeated(draft.draft_logits) if rows else None,
        "draft_sampling": draft.draft_sampling if rows else None,
        "sampling": sampling,
        "keys": mx.random.split(key, NUM_TRIALS),
    }
    tokens = repeated(draft.draft_tokens)
    if draft.parents is not None:
        parents = repeated(mx.array(draft.parents, mx.int32))
        result = verify_tree(repeated(logits), tokens, parents, **options)
    else:
        rule = "token" if rule == "match" else rule
        result = verify_draft(repeated(logits), tokens, rule=rule, **options)
    return mx.mean(result.num_accepted).item()


def judges(rule: str, drafter: str) -> bool:
    """Whether a rule is for a drafter's drafts: token for trees, cascade for draft models."""
    if drafter.endswith("tree"):
        return rule == "token"
    return rule != "cascade" or drafter != "lookup"


def measure(target, tokenizer, contexts, options) -> dict[tuple[str, str, float], dict[int, float]]:
    """For rule, drafter and temperature the mean accepted length in each context with drafts."""
    count = options.num_draft_tokens
    copies = {
        bits: rounded(target, bits)
        for bits in BITS
        if any(drafter.startswith(f"{bits}-bit") for drafter in options.drafters)
    }
    lengths: dict = defaultdict(lambda: defaultdict(list))
    for number, context in enumerate(track(contexts, console=Console(stderr=True))):
        model = CachedModel(target, prefilled(target, context))
        caches = {bits: prefilled(copy, context) for bits, copy in copies.items()}

        def make_drafter(name):
            if name == "lookup":
                return PromptLookup(count), context
            bits = int(name[0])
            cache = {"prompt_cache": cloned(caches[bits])}
            if name.endswith("tree"):
                return DraftTree(copies[bits], tokenizer, WIDTHS, **cache), context[-1:]
            return DraftModel(copies[bits], tokenizer, count, **cache), context[-1:]

        for temperature, name, made_for in itertools.product(
            options.temperatures, options.drafters, ("token", "coupled")
        ):
            rules = [
                rule
                for rule in options.rules
                if judges(rule, name) and (rule == "coupled") == (made_for == "coupled")
            ]
            if not rules:
                continue
            drafter, prompt = make_drafter(name)
            is_tree, draws = isinstance(drafter, DraftTree), isinstance(drafter, DraftModel)
            drafter.begin(
                prompt,
                tokenizer=tokenizer,
                sampling=Sampling(temperature),
                max_tokens=99,
                rule=made_for,
                position=len(context),
            )
            once = temperature == 0 or made_for == "token" and not draws
            for repeat in range(1 if once else options.drafts):
                seeds = np.random.SeedSequence([options.seed, number, repeat]).generate_state(2)
                draft_key, key = (mx.random.key(int(seed)) for seed in seeds)
                draft = drafter.draft(count, draft_key)
                if draft.draft_tokens.size == 0:
                    break
                model.settle(context[-1:], 0)
                if is_tree:
                    logits = model.feed_tree(draft.draft_tokens, draft.parents)
                else:
                    logits = model.feed(draft.draft_tokens)
                mx.eval(logits, draft.draft_tokens)
                for rule in rules:
                    # Coupled drafts are judged by the noise that they were made of.
                    noise = draft_key if rule == "coupled" else key
                    length = accepted(
                        logits, draft, Sampling(temperature), RULES[rule][1], noise, len(context)
                    )
                    lengths[rule, name, temperature][number].append(length)
                # Back to where the context's last token is still to be fed.
                for side in (model, drafter._model) if draws or is_tree else (model,):
                    side.settle([], 0)
                    side.forget(1)
                if draws or is_tree:
                    drafter._model.settle(context[-1:], 0)
    return {
        cell: {number: sum(values) / len(values) for number, values in of_contexts.items()}
        for cell, of_contexts in lengths.items()
    }


def student_quantile(probability: float, freedom: int) -> float:
    """Of |t| with ``freedom`` degrees of freedom. Abramowitz and Stegun, 26.7.3 and 26.7.4."""

    def within(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        cosine = math.cos(angle)
        term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
        for i in range(1 + freedom % 2, freedom, 2):
            total += term
            term *= cosine**2 * i / (i + 1)
        total *= math.sin(angle)
        return (angle + total) * 2 / math.pi if freedom % 2 else total

    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < probability else (low, middle)
    return high


def interval(values: list[float]) -> tuple[float, float] | None:
    """Of the mean; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = student_quantile(CONFIDENCE, n - 1) * deviation / math.sqrt(n)
    return mean - half, mean + half


def summarise(lengths: dict[tuple[str, str, float], dict[int, float]]) -> list[dict]:
    """A row for every rule, drafter and temperature."""
    rows = []
    for (rule, drafter, temperature), of_contexts in lengths.items():
        values = list(of_contexts.values())
        token = lengths.get(("token", drafter, temperature), {})
        more = None
        if rule != "token" and token.keys() == of_contexts.keys():
            more = [of_contexts[number] - token[number] for number in token]
        bounds = None if more is None else interval(more)
        rows.append(
            {
                "rule": RULES[rule][0],
                "drafter": DRAFTERS[drafter],
                "temperature": temperature,
                "mean_accepted_length": sum(values) / len(values),
                "interval": interval(values),
                "contexts": len(values),
                "more_than_token": more and sum(more) / len(more),
                "more_than_token_interval": bounds,
                # Where not one draft fares otherwise there is nothing to tell apart.
                "within_noise": bounds and any(more) and bounds[0] <= 0 <= bounds[1],
            }
        )
    return rows


def cell(row: dict | None) -> str:
    if row is None:
        return ""
    text = f"{row['mean_accepted_length']:.2f}"
    if row["interval"]:
        text += f" ± {(row['interval'][1] - row['interval'][0]) / 2:.2f}"
    return text + " ~" * bool(row["within_noise"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def at_least(least, kind):
        def number(text):
            if not least <= kind(text) < math.inf:
                raise ValueError
            return kind(text)

        number.__name__ = f"number, expected {least} or more"
        return number

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help=f"default: {DEFAULT_MODEL.name}")
    parser.add_argument("--contexts", type=at_least(1, int), default=24)
    parser.add_argument("--drafts", type=at_least(1, int), default=4,
                        help="drawn per context and temperature")  # fmt: skip
    parser.add_argument("--num-draft-tokens", type=at_least(1, int), default=4)
    parser.add_argument("--seed", type=at_least(0, int), default=0, help="of texts and noise")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--temperatures", nargs="+", type=at_least(0, float),
                        default=list(TEMPERATURES))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    for drafter in options.drafters:
        if not any(judges(rule, drafter) for rule in options.rules):
            parser.error(f"--rules: expected one that judges drafts of {drafter}, got none")
    return options


def make_contexts(target, tokenizer, options) -> list[list[int]]:
    """As many as asked for: the first prompts have one more if they cannot have the same number."""
    contexts = []
    for i, prompt in enumerate(PROMPTS.values()):
        count = options.contexts // len(PROMPTS) + (i < options.contexts % len(PROMPTS))
        if count == 0:
            continue
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text = generate(target, tokenizer, ids, drafter=PromptLookup(), max_tokens=96,
                        sampling=Sampling(0.7), seed=options.seed)  # fmt: skip
        if count > len(text.tokens):
            raise SystemExit(
                f"error: --contexts: expected at most {len(text.tokens)} in a text of so many "
                f"tokens, got {count}"
            )
        places = [len(text.tokens) * (i + 1) // (count + 1) for i in range(count)]
        contexts += [ids + text.tokens[:place] for place in places]
    return contexts


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    target, tokenizer = load(options.model)
    contexts = make_contexts(target, tokenizer, options)
    rows = summarise(measure(target, tokenizer, contexts, options))
    for drafter in options.drafters:
        missing = options.contexts - max(
            (row["contexts"] for row in rows if row["drafter"] == DRAFTERS[drafter]), default=0
        )
        if missing:
            note = f"{drafter}: nothing to draft in {missing} of {options.contexts} contexts"
            print(note, file=sys.stderr)
    if not rows:
        raise SystemExit("error: nothing was drafted, so nothing measured")
    if options.json:
        record = {"command": shlex.join(sys.argv), "options": vars(options), "rows": rows}
        json.dump(record, sys.stdout)
        return
    table = Table("drafter", "rule", *(f"T = {t:g}" for t in options.temperatures))
    cells = {(row["drafter"], row["rule"], row["temperature"]): row for row in rows}
    for drafter, rule in itertools.product(options.drafters, options.rules):
        names = DRAFTERS[drafter], RULES[rule][0]
        found = [cells.get((*names, temperature)) for temperature in options.temperatures]
        if any(found):
            table.add_row(*names, *map(cell, found))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"{options.contexts} contexts, seed {options.seed}; ± {CONFIDENCE:.0%} interval"
          + (", unknown from one context" if options.contexts == 1 else "")
          + "; ~ cannot be told from token")  # fmt: skip


if __name__ == "__main__":
    main()

"""Mean accepted length of every rule on the same drafts of a real model.

    python benchmarks/bench_rules.py [--contexts N] [--drafts N] [--num-draft-tokens K] [--json]

Contexts are places in texts that the target wrote. At each, a drafter proposes K tokens and the
target reads them once; then every rule judges the same draft and the same rows, many times with
other noise. (Drafts for coupled noise are made with that noise, so they are others of the same
distribution; a tree has more tokens.) The copies are the target itself with weights rounded to a
few bits. "match" is the rule of mlx-lm's ``speculative_generate_step``: accept while the draft is
what the target draws on its own, that is, with the target's probability, whatever the draft's.
"""

from __future__ import annotations

# ruff: noqa: E402
# OpenBLAS has to be in front before MLX is imported.
from exactspec_openblas import use_openblas

use_openblas()

import argparse
import itertools
import json
import sys
from collections import defaultdict

import mlx.core as mx
import mlx.nn as nn
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
RULES = {
    "match (mlx-lm)": "match",
    "token": "token",
    "block": "block",
    "coupled": "coupled",
    "typical (lossy)": Typical(),
    "cascade 0.1 (lossy)": Cascade(0.1),
}
WIDTHS = (3, 2, 1, 1)
BITS = (4, 3)
NUM_TRIALS = 64


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


def accepted(logits, draft, sampling, rule, seed: int, position: int) -> float:
    """Mean accepted length over NUM_TRIALS keys, or of the one key that coupled drafts have."""
    if rule == "coupled":
        at = mx.array(position, mx.int32)
        result = verify_draft(logits, draft.draft_tokens, sampling=sampling, rule=rule,
                              keys=mx.random.key(seed), positions=at)  # fmt: skip
        return result.num_accepted.item()

    def repeated(x):
        return None if x is None else mx.broadcast_to(x, (NUM_TRIALS, *x.shape))

    # One-hot drafts are accepted with the target's probability: that is the match rule.
    rows = rule != "match" and draft.draft_logits is not None
    options = {
        "draft_logits": repeated(draft.draft_logits) if rows else None,
        "draft_sampling": draft.draft_sampling if rows else None,
        "sampling": sampling,
        "keys": mx.random.split(mx.random.key(seed), NUM_TRIALS),
    }
    tokens = repeated(draft.draft_tokens)
    if draft.parents is not None:
        parents = repeated(mx.array(draft.parents, mx.int32))
        result = verify_tree(repeated(logits), tokens, parents, **options)
    else:
        rule = "token" if rule == "match" else rule
        result = verify_draft(repeated(logits), tokens, rule=rule, **options)
    return mx.mean(result.num_accepted).item()


def measure(target, tokenizer, contexts, options) -> dict:
    count = options.num_draft_tokens
    copies = {f"{bits}-bit copy": rounded(target, bits) for bits in BITS}
    sums: dict = defaultdict(list)
    for number, context in enumerate(track(contexts, console=Console(stderr=True))):
        model = CachedModel(target, prefilled(target, context))
        caches = {name: prefilled(draft, context) for name, draft in copies.items()}

        def drafters():
            yield "prompt lookup", PromptLookup(count), context
            for name, draft in copies.items():
                options = {"prompt_cache": cloned(caches[name])}
                yield name, DraftModel(draft, tokenizer, count, **options), context[-1:]
            for name, draft in copies.items():
                options = {"prompt_cache": cloned(caches[name])}
                yield f"{name}, tree", DraftTree(draft, tokenizer, WIDTHS, **options), context[-1:]

        for temperature, made_for in itertools.product(TEMPERATURES, ("token", "coupled")):
            for name, drafter, prompt in drafters():
                is_tree, draws = isinstance(drafter, DraftTree), isinstance(drafter, DraftModel)
                if made_for == "coupled" and is_tree:
                    continue
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
                    seed = 1000 * number + repeat
                    draft = drafter.draft(count, mx.random.key(seed))
                    if draft.draft_tokens.size == 0:
                        break
                    model.settle(context[-1:], 0)
                    if is_tree:
                        logits = model.feed_tree(draft.draft_tokens, draft.parents)
                    else:
                        logits = model.feed(draft.draft_tokens)
                    mx.eval(logits, draft.draft_tokens)
                    for rule, kind in RULES.items():
                        fits = (kind == "coupled") == (made_for == "coupled")
                        fits = fits and (draws or not isinstance(kind, Cascade))
                        if fits and (kind == "token" or not is_tree):
                            length = accepted(
                                logits, draft, Sampling(temperature), kind, seed + 7, len(context)
                            )
                            sums[rule, name, temperature].append(length)
                    # Back to where the context's last token is still to be fed.
                    for side in (model, drafter._model) if draws or is_tree else (model,):
                        side.settle([], 0)
                        side.forget(1)
                    if draws or is_tree:
                        drafter._model.settle(context[-1:], 0)
    return {key: sum(values) / len(values) for key, values in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help=f"default: {DEFAULT_MODEL.name}")
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--drafts", type=int, default=4, help="drawn per context and temperature")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()

    target, tokenizer = load(options.model)
    contexts = []
    for prompt in PROMPTS.values():
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text = generate(target, tokenizer, ids, drafter=PromptLookup(), max_tokens=96,
                        sampling=Sampling(0.7), seed=0)  # fmt: skip
        count = options.contexts // len(PROMPTS)
        places = [len(text.tokens) * (i + 1) // (count + 1) for i in range(count)]
        contexts += [ids + text.tokens[:place] for place in places]
    lengths = measure(target, tokenizer, contexts, options)
    if options.json:
        rows = [{"rule": r, "drafter": d, "temperature": t, "mean_accepted_length": length}
                for (r, d, t), length in lengths.items()]  # fmt: skip
        json.dump({"command": sys.argv, "contexts": len(contexts), "rows": rows}, sys.stdout)
        return
    table = Table("drafter", "rule", *(f"T = {t:g}" for t in TEMPERATURES))
    names = dict.fromkeys(name for _, name, _ in lengths)
    for name in names:
        for rule in RULES:
            if (rule, name, 1.0) in lengths:
                table.add_row(name, rule, *(f"{lengths[rule, name, t]:.2f}" for t in TEMPERATURES))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()

"""From the options of ``exactspec bench`` to what is measured."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import mlx.core as mx
from rich.console import Console

from .. import _ext
from . import operation
from .operation import DTYPES, SETTINGS, SIZES, SWEEPS, Case
from .report import PLOTTED_SETTING, about

QUICK_SIZES = [(1, 4, 49152)]
QUICK_SETTINGS = [PLOTTED_SETTING, "top_k and top_p"]
# Among fewer ids the token that only the draft likes may be the target's best.
LEAST_VOCABULARY = 64
MAX_SLOTS = _ext.MAX_KEYED_DRAFTS
MOST_LOGITS = 10**9  # of the target: 4 GB, of four inputs
# Options, by the level that they belong to.
LEVELS = {
    "operation": {"sizes": "size", "settings": "setting", "dtypes": "dtype", "threads": "threads"},
    "loop": {
        "model": "model",
        "draft_model": "draft-model",
        "num_draft_tokens": "num-draft-tokens",
        "max_tokens": "max-tokens",
    },
}


class Options(NamedTuple):
    """As typed; None is the default."""

    operation: bool
    loop: bool
    sizes: list[str] | None
    settings: list[str] | None
    dtypes: list[str] | None
    threads: list[int] | None
    rounds: int | None
    model: str | None
    draft_model: str | None
    num_draft_tokens: int | None
    max_tokens: int | None
    quick: bool
    sweep: bool


def run(options: Options, console: Console) -> dict[str, Any]:
    """Measure, with the progress on ``console``; the result is ready for JSON.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    for name in ("rounds", "num_draft_tokens", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    for level, names in LEVELS.items():
        for name, option in names.items():
            if not getattr(options, level) and getattr(options, name) is not None:
                raise ValueError(f"--{option}: expected with the {level} only, got it without")
    cases = plan(options) if options.operation else []
    result = about()
    if options.loop:
        # Only then, since it takes seconds to import.
        from . import loop

        models = loop.load_models(options.model, options.draft_model)
    if options.operation:
        result["operation"] = operation.run(cases, console)
        if result["operation"]["stopped"]:
            return result
    if options.loop:
        result["loop"] = loop.run(
            models,
            num_draft_tokens=options.num_draft_tokens or 4,
            temperatures=(0.7,) if options.quick else (0.0, 0.7),
            prompts=["edit"] if options.quick else list(loop.PROMPTS),
            max_tokens=options.max_tokens or (12 if options.quick else 96),
            rounds=options.rounds or (1 if options.quick else 3),
            console=console,
        )
    return result


def plan(options: Options) -> list[Case]:
    """The cases to measure; ``ValueError`` for an option out of range."""
    sizes = [_size(text) for text in options.sizes or ()]
    sizes = sizes or (QUICK_SIZES if options.quick else SIZES)
    quick = QUICK_SETTINGS if options.quick else None
    settings = _known("--setting", options.settings or quick, SETTINGS)
    dtypes = _known("--dtype", options.dtypes, DTYPES)
    if options.dtypes is None:
        dtypes = ["float32"] if options.quick else ["float32", "bfloat16"]
    rounds = options.rounds or (5 if options.quick else 15)
    all_threads: list[int | None] = [None]
    if mx.default_device() == mx.Device(mx.cpu):
        cores = os.cpu_count() or 1
        all_threads = list(dict.fromkeys(options.threads or [1, cores]))
        if options.quick and options.threads is None:
            all_threads = [cores]
        for threads in all_threads:
            if not 1 <= threads <= cores:
                raise ValueError(f"--threads: expected 1 to {cores}, got {threads}")
    cases = []
    for threads in all_threads:
        for size in sizes:
            for setting in settings:
                for dtype in dtypes:
                    for cold in (False,) if options.quick else (False, True):
                        cases.append(Case(size, setting, dtype, cold, threads, rounds))
        if options.sweep:
            # Beside one of the sizes above, so that none is measured twice.
            new = (Case(size, PLOTTED_SETTING, threads=threads, rounds=rounds) for size in SWEEPS)
            cases += [case for case in dict.fromkeys(new) if case not in cases]
    return cases


def _size(text: str) -> tuple[int, int, int]:
    try:
        batch, num_slots, vocab_size = map(int, text.split(","))
        if min(batch, num_slots) < 1 or num_slots > MAX_SLOTS or vocab_size < LEAST_VOCABULARY:
            raise ValueError
        if batch * (num_slots + 1) * vocab_size > MOST_LOGITS:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--size: expected B,K,V with B >= 1, K from 1 to {MAX_SLOTS}, V >= {LEAST_VOCABULARY} "
            f"and at most {MOST_LOGITS} logits, got {text!r}"
        ) from None
    return batch, num_slots, vocab_size


def _known(option: str, names: list[str] | None, known: dict[str, Any]) -> list[str]:
    for name in names or ():
        if name not in known:
            raise ValueError(f"{option}: expected one of {'; '.join(known)}, got {name!r}")
    return list(dict.fromkeys(names or known))

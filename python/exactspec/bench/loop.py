"""The decode loop beside its peers: greedy texts compared, then timed, then taken apart."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from rich.console import Console
from rich.progress import Progress

from .. import Sampling
from ..cached_model import PREFILL_CHUNK
from ..drafters import Drafter, DraftModel, Hybrid, MTPDrafter, PromptLookup
from ..generate import stream_generate
from ..heads import DraftHead, load_default_head
from ..models import DEFAULT_MODEL, load
from .report import INTERRUPTED

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

PLAIN = "plain"
PHASES = ("draft", "target, building", "target", "verify", "python")


class Text(NamedTuple):
    """A generated text.

    Attributes:
        tokens: ids.
        accepted: how many of them were drafts.
        cycles: forwards of the target.
        seconds: after the prompt was read.
    """

    tokens: list[int]
    accepted: int
    cycles: int
    seconds: float


class Models(NamedTuple):
    """A target, a draft model of the same tokenizer and, of the default model, the draft head."""

    target: nn.Module
    draft: nn.Module
    head: DraftHead | None
    tokenizer: Any
    names: dict[str, str]


def load_models(model: str | None, draft_model: str | None) -> Models:
    """Load both; without a draft model, a copy of the target rounded to 4 bits stands in."""
    target, tokenizer = load(model)
    names = {"model": model or DEFAULT_MODEL.name}
    if draft_model is None:
        draft = rounded(target, 4)
        names["draft_model"] = "the same, rounded to 4 bits"
    else:
        draft, _ = load(draft_model)
        names["draft_model"] = draft_model
    head = load_default_head(target) if model is None else None
    return Models(target, draft, head, tokenizer, names)


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """A copy of a model with weights rounded to a few bits: it follows the model closely."""

    def round_weights(weights: mx.array) -> mx.array:
        if weights.ndim < 2 or weights.shape[-1] % 64:
            return weights
        return mx.dequantize(*mx.quantize(weights, 64, bits), 64, bits).astype(weights.dtype)

    draft = copy.deepcopy(model)
    draft.update(tree_map(round_weights, draft.parameters()))
    mx.eval(draft.parameters())
    return draft


Peer = Callable[[list[int], float, int, int], Text]
"""From prompt, temperature, most tokens and seed to a text."""


def make_peers(models: Models, num_draft_tokens: int) -> dict[str, Peer]:
    """Ways to decode, plain decoding by this package first."""
    target, draft, head, tokenizer, _ = models
    peers = {
        PLAIN: _ours(models, lambda: None),
        "plain, mlx-lm": _mlx_lm(tokenizer, target, None, num_draft_tokens),
        "prompt lookup": _ours(models, lambda: PromptLookup(num_draft_tokens)),
        "draft model": _ours(models, lambda: DraftModel(draft, tokenizer, num_draft_tokens)),
        "draft model, mlx-lm": _mlx_lm(tokenizer, target, draft, num_draft_tokens),
    }
    if head is not None:
        # Its later drafts are seldom accepted.
        count = min(num_draft_tokens, 2)
        peers["draft head"] = _ours(models, lambda: MTPDrafter(head, count))
        # As `exactspec generate` drafts by default.
        peers["prompt lookup, else draft head"] = _ours(
            models,
            lambda: Hybrid(PromptLookup(num_draft_tokens, min_ngram=3), MTPDrafter(head)),
        )
    return peers


def _ours(models: Models, make_drafter: Callable[[], Drafter | None]) -> Peer:
    def decode(prompt: list[int], temperature: float, max_tokens: int, seed: int) -> Text:
        start = time.perf_counter()
        items = list(
            stream_generate(
                models.target,
                models.tokenizer,
                prompt,
                drafter=make_drafter(),
                sampling=Sampling(temperature),
                max_tokens=max_tokens,
                seed=seed,
            )
        )
        seconds = time.perf_counter() - start
        done = items[-1].statistics
        tokens = [item.token for item in items]
        return Text(tokens, done.accepted, done.cycles, seconds - done.prompt_time)

    return decode


def _mlx_lm(tokenizer: Any, target: nn.Module, draft: nn.Module | None, count: int) -> Peer:
    def decode(prompt: list[int], temperature: float, max_tokens: int, seed: int) -> Text:
        mx.random.seed(seed)
        cache = [c for model in (target, draft) if model for c in _read(model, prompt[:-1])]
        options = {
            "max_tokens": max_tokens,
            "sampler": make_sampler(temperature) if temperature else None,
            "prompt_cache": cache,
        }
        last = mx.array(prompt[-1:])
        detokenizer = tokenizer.detokenizer
        start = time.perf_counter()
        if draft is None:
            steps = ((token, False) for token, _ in generate_step(last, target, **options))
        else:
            options["num_draft_tokens"] = count
            steps = (
                (token, drafted)
                for token, _, drafted in speculative_generate_step(last, target, draft, **options)
            )
        tokens, accepted = [], 0
        for token, drafted in steps:
            tokens.append(int(token))
            accepted += drafted
            if token in tokenizer.eos_token_ids:
                break
            detokenizer.add_token(token)
        seconds = time.perf_counter() - start
        steps.close()
        # Each cycle ends in a token that was not drafted, but for one that the limit cuts off.
        return Text(tokens, accepted, len(tokens) - accepted + drafted, seconds)

    return decode


def _read(model: nn.Module, tokens: list[int]) -> list[Any]:
    """A cache that holds the tokens."""
    cache = make_prompt_cache(model)
    for start in range(0, len(tokens), PREFILL_CHUNK):
        model(mx.array(tokens[start : start + PREFILL_CHUNK])[None], cache=cache)
        mx.eval([c.state for c in cache])
    return cache


def compare(
    peers: dict[str, Peer], prompt: list[int], temperature: float, max_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Compare the greedy texts, then time all peers in turns; one row of the result for each."""
    # Also the warm-up.
    greedy = {name: decode(prompt, 0.0, max_tokens, 0).tokens for name, decode in peers.items()}
    texts: dict[str, list[Text]] = {name: [] for name in peers}
    names = list(peers)
    for seed in range(rounds):
        turn = seed % len(names)
        for name in names[turn:] + names[:turn]:
            texts[name].append(peers[name](prompt, temperature, max_tokens, seed))
    speeds = {name: [len(t.tokens) / t.seconds for t in ts] for name, ts in texts.items()}
    rows = []
    for name, of_peer in texts.items():
        accepted, cycles = (sum(getattr(t, field) for t in of_peer) for field in Text._fields[1:3])
        ratios = [speed / plain for speed, plain in zip(speeds[name], speeds[PLAIN])]
        rows.append(
            {
                "peer": name,
                "tokens_per_second": statistics.median(speeds[name]),
                "slowest": min(speeds[name]),
                "fastest": max(speeds[name]),
                "speedup": statistics.median(ratios),
                "tokens_per_cycle": sum(len(t.tokens) for t in of_peer) / cycles,
                "mean_accepted_length": accepted / cycles,
                "same_greedy_text": greedy[name] == greedy[PLAIN],
            }
        )
    return rows


class _Timed:
    """A model that adds up the time in which its graph is built."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        start = time.perf_counter()
        logits = self._model(*args, **options)
        self.seconds += time.perf_counter() - start
        return logits


def take_apart(
    models: Models, prompt: list[int], temperature: float, max_tokens: int, count: int
) -> list[dict[str, Any]]:
    """Where the time of a cycle goes, in ms per cycle, for each way to draft.

    The device is waited for at the end of each phase; what is left of the time on the wall is
    Python's: text, statistics, rolling caches back.
    """
    drafters = {
        PLAIN: lambda: None,
        "prompt lookup": lambda: PromptLookup(count),
        "draft model": lambda: DraftModel(models.draft, models.tokenizer, count),
    }
    rows = []
    for name, make_drafter in drafters.items():
        target = _Timed(models.target)
        stream = stream_generate(
            target,
            models.tokenizer,
            prompt,
            drafter=make_drafter(),
            sampling=Sampling(temperature),
            max_tokens=max_tokens,
            seed=0,
            profile=True,
        )
        # From the end of the first cycle on: before it, the prompt is read.
        done = next(stream).statistics
        building, cycles, start = target.seconds, done.cycles, time.perf_counter()
        before = done.draft_time, done.target_time, done.verify_time
        for item in stream:
            pass
        wall = time.perf_counter() - start
        cycles = done.cycles - cycles
        if not cycles:
            continue
        draft, forward, verify = (
            x - y for x, y in zip((done.draft_time, done.target_time, done.verify_time), before)
        )
        building = target.seconds - building
        seconds = (draft, building, forward - building, verify, wall - draft - forward - verify)
        milliseconds = {phase: 1e3 * s / cycles for phase, s in zip(PHASES, seconds)}
        own = milliseconds["target"] + milliseconds["target, building"]
        if name == "draft model":
            own += milliseconds["draft"]
        total = 1e3 * wall / cycles
        rows.append({"drafter": name, "ms": milliseconds, "outside_forwards": 1 - own / total})
    return rows


def run(
    models: Models,
    *,
    num_draft_tokens: int,
    temperatures: tuple[float, ...],
    prompts: list[str],
    max_tokens: int,
    rounds: int,
    console: Console,
) -> dict[str, Any]:
    """Measure the loop, with the progress on ``console``. Ctrl-C ends it with the rows so far.

    Returns:
        ``{"model", "draft_model", "results": [...], "cycle": [...], "stopped": None or the
        reason}`` and the options, ready for JSON.
    """
    peers = make_peers(models, num_draft_tokens)
    rows, cycle, stopped = [], [], None
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("decode loop", total=len(prompts) * len(temperatures) + 1)
            for name in prompts:
                ids = _encode(models.tokenizer, PROMPTS[name])
                for temperature in temperatures:
                    new = compare(peers, ids, temperature, max_tokens, rounds)
                    rows += [{"prompt": name, "temperature": temperature, **row} for row in new]
                    progress.advance(task)
            ids = _encode(models.tokenizer, PROMPTS[prompts[0]])
            cycle = take_apart(models, ids, temperatures[-1], max_tokens, num_draft_tokens)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    return {
        **models.names,
        "num_draft_tokens": num_draft_tokens,
        "max_tokens": max_tokens,
        "rounds": rounds,
        "results": rows,
        "cycle": cycle,
        "stopped": stopped,
    }


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)

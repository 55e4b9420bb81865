"""The decode loop: exactness, cache contents, ends of a text, errors, and one wait per cycle."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import scipy.stats
from exactspec import Sampling, sample
from exactspec import cached_model as cached_model_module
from exactspec import generate as generate_module
from exactspec.drafters import (
    Adaptive,
    Draft,
    Drafter,
    DraftModel,
    DraftTree,
    Hybrid,
    MTPDrafter,
    PromptLookup,
)
from exactspec.generate import NonFiniteLogitsError, generate, stream_generate
from exactspec.rules import EXACT_RULES
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from tolerances import CHI_SQUARE_P
from toy_models import (
    NEAR_TIE,
    TableModel,
    cached_tokens,
    first_difference_gap,
    tiny_head,
    tiny_llama,
    toy_tokenizer,
)

GREEDY = Sampling(temperature=0)
PROMPT = [3, 7, 1, 4, 3, 7, 1]
TOKENIZER = toy_tokenizer()
NO_STOP = ()
BEGIN = {
    "tokenizer": TOKENIZER,
    "sampling": Sampling(),
    "max_tokens": 99,
    "rule": "token",
    "position": 5,
}


def run(model, prompt=PROMPT, **options):
    options.setdefault("stop_tokens", NO_STOP)
    return generate(model, TOKENIZER, prompt, **options)


def random_table(vocab_size: int, seed: int = 5) -> mx.array:
    """Logits whose even positions ignore the token there, so that pairs are independent."""
    table = mx.random.normal((2, vocab_size, vocab_size), key=mx.random.key(seed))
    table[0] = table[0, 0]
    return table


def counting_model(vocab_size: int = 16, *, wrong_after: int | None = None) -> TableModel:
    """Counts up: token t is followed by t + 1, but ``wrong_after`` by 1."""
    successors = (mx.arange(vocab_size) + 1) % vocab_size
    if wrong_after is not None:
        successors[wrong_after] = 1
    rows = 60.0 * (mx.arange(vocab_size) == successors[:, None])
    return TableModel(mx.stack([rows, rows]))


class SparseDrafter(Drafter):
    """Draws from the same three tokens each time: a drafter with a sparse distribution."""

    ids, probs = mx.array([6, 1, 3], mx.int32), mx.array([0.5, 0.3, 0.2])

    def draft(self, limit, key):
        count = min(limit, 3)
        columns = mx.stack(
            [sample(mx.log(self.probs), keys=k).tokens for k in mx.random.split(key, count)]
        )
        return Draft(
            draft_tokens=self.ids[columns],
            draft_ids=mx.broadcast_to(self.ids, (count, 3)),
            draft_probs=mx.broadcast_to(self.probs, (count, 3)),
        )


class FixedDrafter(Drafter):
    """Proposes given tokens over and over."""

    def __init__(self, tokens):
        self.tokens = tokens

    def draft(self, limit, key):
        return Draft(mx.array(self.tokens[:limit], mx.int32))


# Exactness


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", ["lookup", "same model", "similar model", "other model"])
def test_greedy_text_is_that_of_plain_decoding(kind, num_draft_tokens, figure):
    target = tiny_llama()
    if kind == "lookup":
        drafter = PromptLookup(num_draft_tokens, min_ngram=1)
    else:
        noise, seed = {"same model": (0, 0), "similar model": (0.02, 0), "other model": (0, 9)}[
            kind
        ]
        drafter = DraftModel(tiny_llama(seed=seed, noise=noise), TOKENIZER, num_draft_tokens)
    plain = run(target, sampling=GREEDY, max_tokens=60)
    other = run(target, sampling=GREEDY, max_tokens=60, drafter=drafter)
    gap = first_difference_gap(target, PROMPT, plain.tokens, other.tokens)
    if gap is not None:
        figure("gap of the two best logits at the first difference", gap)
        assert gap < NEAR_TIE
    assert len(set(plain.tokens)) > 10  # else the test would be about one repeated token
    rate = other.statistics.acceptance_rate
    assert {"same model": rate == 1, "similar model": 0.1 < rate < 1}.get(kind, rate < 0.5)


@pytest.mark.quick(kind=["block", "tree"])
@pytest.mark.parametrize(
    "kind",
    [
        *("lookup", "opposite model", "hot model", "padded model", "sparse", "adaptive"),
        *("block", "coupled", "tree", "lookup tree"),
    ],
)
def test_joint_distribution_of_consecutive_tokens(kind, erratic_clock):
    vocab_size = 8
    num_pairs = 20_000 if kind in ("lookup", "opposite model") else 5_000
    table = random_table(vocab_size)
    rule = kind if kind in EXACT_RULES else "token"
    if kind == "lookup":
        drafter = PromptLookup(3, min_ngram=1)
    elif kind == "sparse":
        drafter = SparseDrafter()
    elif kind == "tree":
        drafter = DraftTree(TableModel(-0.3 * table), TOKENIZER, (2, 3, 1))
    elif kind == "lookup tree":
        drafter = PromptLookup(3, min_ngram=1, num_branches=3)
    elif kind in ("block", "coupled"):
        drafter = DraftModel(TableModel(-0.3 * table), TOKENIZER, 3)
    elif kind == "adaptive":
        drafter = Adaptive(DraftModel(TableModel(-table), TOKENIZER, 3))
    elif kind == "opposite model":
        # Most drafts are rejected, so that noise shared with drafting would show.
        drafter = DraftModel(TableModel(-table), TOKENIZER, 3)
    elif kind == "hot model":
        sampling = Sampling(temperature=2.5, top_k=5)
        drafter = DraftModel(TableModel(table), TOKENIZER, 3, sampling=sampling)
    elif kind == "padded model":
        # Ids that the target does not have, each as likely as its best token.
        padded = mx.concatenate([0.5 * table, mx.ones((2, vocab_size, 3))], axis=2)
        padded = mx.concatenate([padded, padded[:, :3]], axis=1)
        drafter = DraftModel(TableModel(padded), TOKENIZER, 3)
    # Many texts, since the time for one grows with the square of its length.
    results = [
        run(TableModel(table), [0], drafter=drafter, rule=rule, max_tokens=100, seed=seed)
        for seed in range(2 * num_pairs // 100)
    ]

    first = mx.softmax(table[0, 0]).tolist()
    second = np.array(mx.softmax(table[1], axis=1))
    joint = np.array(first)[:, None] * second
    tokens = np.array([result.tokens for result in results])
    pairs = tokens.reshape(-1, 2)
    assert_distributed(pairs[:, 0] * vocab_size + pairs[:, 1], joint)
    # Across pairs the tokens are independent.
    across = tokens[:, 1:-1].reshape(-1, 2)
    product = joint.sum(0)[:, None] * np.array(first)
    assert_distributed(across[:, 0] * vocab_size + across[:, 1], product)
    assert {source for result in results for source in result.sources} == {
        "draft",
        "residual",
        "bonus",
    }


def assert_distributed(observed: np.ndarray, probabilities: np.ndarray) -> None:
    expected = len(observed) * probabilities.ravel() / probabilities.sum()
    counts = np.bincount(observed, minlength=expected.size)
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert scipy.stats.chisquare(counts, expected).pvalue > CHI_SQUARE_P


@pytest.mark.parametrize("draft_vocab_size", [27, 40])
def test_draft_model_of_another_width(draft_vocab_size):
    target = tiny_llama(32)
    drafter = DraftModel(tiny_llama(draft_vocab_size, seed=9), TOKENIZER, 3)
    # The prompt has ids beyond the narrow draft model, the drafts ids beyond the target.
    prompt = [31, 30, 29, 3]
    plain = run(target, prompt, sampling=GREEDY, max_tokens=40)
    other = run(target, prompt, sampling=GREEDY, max_tokens=40, drafter=drafter)
    assert other.tokens == plain.tokens
    sampled = run(target, prompt, max_tokens=40, drafter=drafter, seed=1)
    assert max(sampled.tokens) < 32


def test_models_see_only_ids_of_their_own():
    seen = {}

    class Recorder(TableModel):
        def __call__(self, tokens, cache=None):
            seen.setdefault(self.table.shape[1], []).append(tokens)
            return super().__call__(tokens, cache)

    # Each draft of the wider model is an id that the target does not have, and the target's last
    # ids are none of the narrower draft model's.
    target = Recorder(random_table(8))
    wide = Recorder(mx.broadcast_to(60.0 * (mx.arange(11) > 7), (2, 11, 11)))
    for draft in (wide, Recorder(random_table(6))):
        run(target, [7, 6, 7], drafter=DraftModel(draft, TOKENIZER, 3), max_tokens=60, seed=0)
    for width, tokens in seen.items():
        assert max(mx.max(t).item() for t in tokens) == width - 1


def test_greedy_drafts_for_a_sampled_text():
    model = TableModel(random_table(8))
    drafter = DraftModel(model, TOKENIZER, 2, sampling=GREEDY)
    result = run(model, [0], drafter=drafter, max_tokens=500, seed=0)
    best = mx.argmax(model.table, axis=2).tolist()
    text = [0, *result.tokens]
    for i, source in enumerate(result.sources):
        if source == "draft":
            assert text[i + 1] == best[i % 2][text[i]]
    assert 0.1 < result.statistics.acceptance_rate < 0.9


def test_log_probabilities():
    target = tiny_llama()
    sampling = Sampling(temperature=0.8, top_k=5)
    drafter = DraftModel(tiny_llama(noise=0.02), TOKENIZER, 3)
    raw, filtered = (
        run(target, sampling=sampling, drafter=drafter, max_tokens=30, seed=3, logprobs=kind)
        for kind in ("raw", "filtered")
    )
    assert raw.tokens == filtered.tokens and set(raw.sources) >= {"draft", "residual"}
    logits = target(mx.array([PROMPT + raw.tokens[:-1]]))[0, len(PROMPT) - 1 :]
    chosen = mx.array(raw.tokens)[:, None]

    def chosen_logprobs(values):
        values = values - mx.logsumexp(values, axis=1, keepdims=True)
        return np.array(mx.take_along_axis(values, chosen, axis=1)[:, 0])

    np.testing.assert_allclose(raw.logprobs, chosen_logprobs(logits), atol=2e-3)
    fifth = mx.sort(logits, axis=1)[:, -5:-4]
    kept = mx.where(logits >= fifth, logits / 0.8, -mx.inf)
    np.testing.assert_allclose(filtered.logprobs, chosen_logprobs(kept), atol=2e-3)
    assert run(target, max_tokens=2).logprobs is None


# Ends of a text, and the caches


def drafters_and_caches(target):
    """Drafters that are right always, sometimes and never, with their cache if they have one."""
    yield None, None
    yield PromptLookup(3, min_ngram=1), None
    for model in (target, counting_model(wrong_after=4), counting_model(wrong_after=2)):
        for num_draft_tokens in (1, 3, 5):
            cache = make_prompt_cache(model)
            yield DraftModel(model, TOKENIZER, num_draft_tokens, prompt_cache=cache), cache
    for model in (target, counting_model(wrong_after=2)):
        cache = make_prompt_cache(model)
        drafter = Adaptive(DraftModel(model, TOKENIZER, 5, prompt_cache=cache))
        # Nothing was accepted lately: after a draft come cycles without one.
        for _ in range(20):
            drafter._length.record(5, 5, 0, 5.0)
            drafter._length.record(0, 0, 0, 1.0)
        yield drafter, cache


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_token_limit(max_tokens):
    target = counting_model()
    for drafter, draft_cache in drafters_and_caches(target):
        cache = make_prompt_cache(target)
        result = run(target, [1, 2], drafter=drafter, max_tokens=max_tokens, prompt_cache=cache)
        assert result.tokens == list(range(3, 3 + max_tokens))
        assert result.finish_reason == "length"
        assert cached_tokens(cache) == [1, 2, *result.tokens]
        assert draft_cache is None or cached_tokens(draft_cache) == [1, 2, *result.tokens]


@pytest.mark.parametrize("stop", range(3, 9))
def test_stop_token_inside_an_accepted_run(stop):
    target = counting_model()
    for drafter, draft_cache in drafters_and_caches(target):
        cache = make_prompt_cache(target)
        result = run(target, [1, 2], drafter=drafter, stop_tokens=[stop, 14], prompt_cache=cache)
        assert result.tokens == list(range(3, stop + 1))
        assert result.finish_reason == "stop"
        assert cached_tokens(cache) == [1, 2, *result.tokens]
        assert draft_cache is None or cached_tokens(draft_cache) == [1, 2, *result.tokens]


@pytest.mark.parametrize("num_wanted", range(1, 9))
def test_consumer_goes_away(num_wanted):
    target = counting_model()
    for drafter, draft_cache in drafters_and_caches(target):
        cache = make_prompt_cache(target)
        stream = stream_generate(
            target, TOKENIZER, [1, 2], drafter=drafter, max_tokens=12, prompt_cache=cache
        )
        items = [next(stream) for _ in range(num_wanted)]
        stream.close()
        tokens = [item.token for item in items]
        assert cached_tokens(cache) == [1, 2, *tokens]
        assert draft_cache is None or cached_tokens(draft_cache) == [1, 2, *tokens]
        assert items[-1].statistics.generated_tokens == num_wanted


def test_interrupted_evaluation_leaves_the_text_in_the_cache(monkeypatch):
    target = counting_model()
    cache, draft_cache = make_prompt_cache(target), make_prompt_cache(target)
    drafter = DraftModel(target, TOKENIZER, 3, prompt_cache=draft_cache)
    stream = stream_generate(
        target, TOKENIZER, [1, 2], drafter=drafter, max_tokens=12, prompt_cache=cache
    )
    tokens = [next(stream).token for _ in range(4)]  # a whole cycle
    interrupt_eval(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert cached_tokens(cache) == cached_tokens(draft_cache) == [1, 2, *tokens]


def interrupt_eval(monkeypatch, after):
    """From its call number ``after`` on, ``mx.eval`` is interrupted once."""
    evaluate, calls = mx.eval, []

    def interrupted(*arrays):
        calls.append(arrays)
        if len(calls) > after:
            monkeypatch.setattr(mx, "eval", evaluate)
            raise KeyboardInterrupt
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", interrupted)


# The draft model reads the prompt first, in three chunks, then the target in as many.
@pytest.mark.parametrize("after", range(6))
def test_interrupted_while_reading_the_prompt(after, monkeypatch):
    monkeypatch.setattr(cached_model_module, "PREFILL_CHUNK", 3)
    target = counting_model()
    cache, draft_cache = make_prompt_cache(target), make_prompt_cache(target)
    drafter = DraftModel(target, TOKENIZER, 3, prompt_cache=draft_cache)
    run(target, [14], drafter=drafter, max_tokens=1, prompt_cache=cache)
    stream = stream_generate(
        target, TOKENIZER, list(range(1, 10)), drafter=drafter, prompt_cache=cache
    )
    interrupt_eval(monkeypatch, after)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    prompt = [] if after < 3 else list(range(1, 10))
    assert cached_tokens(cache) == cached_tokens(draft_cache) == [14, 15, *prompt]


class FailingDrafter(Drafter):
    """Fails in one of its methods."""

    def __init__(self, method):
        self.calls = []
        for name in ("begin", "draft", "extend"):
            setattr(self, name, self.failing if name == method else self.recording(name))

    def recording(self, name):
        def record(*_, **__):
            self.calls.append(name)
            return Draft(mx.array([2], mx.int32))

        return record

    def failing(self, *_, **__):
        raise OSError("no such draft")

    def finish(self):
        self.calls.append("finish")


@pytest.mark.parametrize(
    ("method", "calls", "cached"),
    [
        ("begin", ["finish"], []),
        ("draft", ["begin", "extend", "finish"], [1, 2]),
        ("extend", ["begin", "draft", "finish"], [1, 2, 3]),
    ],
)
def test_a_drafter_that_fails_is_finished(method, calls, cached):
    target = counting_model()
    cache, drafter = make_prompt_cache(target), FailingDrafter(method)
    with pytest.raises(OSError, match="no such draft"):
        run(target, [1, 2], drafter=drafter, prompt_cache=cache)
    assert drafter.calls == calls
    assert cached_tokens(cache) == cached


def test_a_draft_model_that_cannot_begin():
    target = counting_model()
    drafter = DraftModel(target, toy_tokenizer(31), prompt_cache=make_prompt_cache(target))
    cache = make_prompt_cache(target)
    with pytest.raises(ValueError, match="tokenizer"):
        run(target, [1, 2], drafter=drafter, prompt_cache=cache)
    assert cached_tokens(cache) == cached_tokens(drafter.prompt_cache) == []


@pytest.mark.parametrize("max_tokens", [5, 6, 7, 8])
def test_continuing_from_the_caches(max_tokens):
    target, draft = tiny_llama(), tiny_llama(noise=0.02)
    cache, draft_cache = make_prompt_cache(target), make_prompt_cache(draft)
    drafter = DraftModel(draft, TOKENIZER, 3, prompt_cache=draft_cache)
    options = {"sampling": GREEDY, "max_tokens": max_tokens, "drafter": drafter}
    first = run(target, PROMPT, prompt_cache=cache, **options)
    second = run(target, [5, 9], prompt_cache=cache, **options)
    text = [*PROMPT, *first.tokens, 5, 9]
    assert second.tokens == run(target, text, sampling=GREEDY, max_tokens=max_tokens).tokens
    text += second.tokens
    for model, continued in ((target, cache), (draft, draft_cache)):
        assert continued[0].offset == len(text)
        logits = model(mx.array([[2]]), cache=continued)[0, -1]
        fresh = model(mx.array([[*text, 2]]))[0, -1]
        np.testing.assert_allclose(np.array(logits), np.array(fresh), atol=2e-3)


def test_drafts_never_exceed_the_token_limit():
    widths = []

    class Recorder(TableModel):
        def __call__(self, tokens, cache=None):
            if cache is not None:
                widths.append(tokens.shape[1])
            return super().__call__(tokens, cache)

    target = Recorder(counting_model().table)
    run(target, [1], drafter=DraftModel(counting_model(), TOKENIZER, 4), max_tokens=8)
    assert widths == [5, 3]


def test_long_prompt_is_read_in_chunks(monkeypatch):
    target = tiny_llama()
    prompt = [(7 * i) % 31 for i in range(23)]
    whole = run(target, prompt, sampling=GREEDY, max_tokens=10)
    monkeypatch.setattr(cached_model_module, "PREFILL_CHUNK", 4)
    lengths = []
    original = type(target).__call__

    def recorded(self, tokens, cache=None):
        lengths.append(tokens.shape[1])
        return original(self, tokens, cache)

    monkeypatch.setattr(type(target), "__call__", recorded)
    assert run(target, prompt, sampling=GREEDY, max_tokens=10).tokens == whole.tokens
    assert lengths[1:7] == [4, 4, 4, 4, 4, 2]  # after the one that tells the vocabulary size


@pytest.mark.parametrize(
    "cache", [RotatingKVCache(max_size=20), ArraysCache(2), CacheList(KVCache(), ArraysCache(2))]
)
def test_cache_that_cannot_be_rolled_back(cache):
    name = "RotatingKVCache" if isinstance(cache, RotatingKVCache) else "ArraysCache"
    with pytest.raises(ValueError, match=rf"\[stream_generate\] prompt_cache: .* got {name};"):
        run(counting_model(), drafter=PromptLookup(), prompt_cache=[cache], max_tokens=20)
    drafter = DraftModel(counting_model(), TOKENIZER, prompt_cache=[cache])
    with pytest.raises(ValueError, match=rf"\[DraftModel\] prompt_cache: .* got {name};"):
        run(counting_model(), drafter=drafter, max_tokens=20)


def test_rotating_cache_with_room_and_without_a_drafter():
    target = tiny_llama()
    plain = run(target, sampling=GREEDY, max_tokens=20)
    for drafter, max_size in ((DraftModel(tiny_llama(noise=0.02), TOKENIZER, 3), 28), (None, 8)):
        cache = make_prompt_cache(target)
        cache = [RotatingKVCache(max_size=max_size) for _ in cache]
        result = run(target, sampling=GREEDY, max_tokens=20, drafter=drafter, prompt_cache=cache)
        # A window of 8 changes the text, but not that decoding works.
        assert len(result.tokens) == 20 and (drafter is None or result.tokens == plain.tokens)


# Sources, text, statistics


def test_sources():
    target = counting_model()
    sources = run(target, [1], drafter=FixedDrafter([2, 3, 9]), max_tokens=5).sources
    # The last cycle has no room for a draft.
    assert sources == ["draft", "draft", "residual", "residual", "bonus"]
    sources = run(target, [1], drafter=FixedDrafter([2, 3]), max_tokens=4).sources
    assert sources == ["draft", "draft", "bonus", "bonus"]
    assert run(target, [1], max_tokens=2).sources == ["bonus", "bonus"]


def test_a_draft_ends_at_its_first_placeholder():
    options = {"drafter": FixedDrafter([2, 3, -1, 7]), "max_tokens": 8}
    result = run(counting_model(), [1], **options)
    # Cycles: 2 3 4 (of two drafts); 5, 6, 7, 8 with a draft rejected; 9 without one.
    assert result.tokens == list(range(2, 10))
    assert result.sources == ["draft", "draft", "bonus"] + ["residual"] * 4 + ["bonus"]
    assert result.statistics.slot_drafted == [5, 4] and result.statistics.slot_accepted == [1, 1]
    nothing = run(counting_model(), [1], drafter=FixedDrafter([-1]), max_tokens=3)
    assert nothing.sources == ["bonus"] * 3 and nothing.statistics.drafted == 0


def test_text_and_finish_reason():
    target = counting_model()
    items = list(stream_generate(target, TOKENIZER, "w12", drafter=PromptLookup(), max_tokens=9))
    assert [item.token for item in items] == [13, 14, 15, 0]
    assert "".join(item.text for item in items) == " w13 w14 w15"
    assert [item.finish_reason for item in items] == [None, None, None, "stop"]
    result = run(target, mx.array([1, 2]), max_tokens=3)
    assert (result.text, result.finish_reason) == (" w3 w4 w5", "length")


def test_statistics():
    result = run(
        counting_model(),
        [1],
        drafter=FixedDrafter([2, 3, 9]),
        max_tokens=6,
        profile=True,
    )
    statistics = result.statistics
    # Cycles: 2 3 4 (of three drafts), 5, 6, and 7 without a draft.
    assert (statistics.prompt_tokens, statistics.generated_tokens, statistics.cycles) == (1, 6, 4)
    assert statistics.slot_drafted == [3, 2, 1] and statistics.slot_accepted == [1, 1, 0]
    assert (statistics.drafted, statistics.accepted) == (6, 2)
    assert statistics.slot_acceptance_rates == [1 / 3, 1 / 2, 0]
    assert statistics.acceptance_rate == 1 / 3
    assert statistics.mean_accepted_length == 0.5 and statistics.tokens_per_cycle == 1.5
    assert statistics.tokens_per_second == 6 / statistics.generation_time
    phases = [statistics.draft_time, statistics.target_time, statistics.verify_time]
    assert min(phases) > 0 and sum(phases) < statistics.generation_time
    plain = run(counting_model(), [1, 2, 3], max_tokens=2).statistics
    assert plain.draft_time is None and plain.acceptance_rate == 0 and plain.tokens_per_cycle == 1
    assert plain.prompt_tokens_per_second == 2 / plain.prompt_time


# Randomness


def test_seeds():
    model = TableModel(random_table(16))
    drafter = DraftModel(TableModel(-model.table), TOKENIZER, 3)
    options = {"drafter": drafter, "max_tokens": 40}
    texts = [run(model, [0], seed=seed, **options).tokens for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    mx.random.seed(1)
    unseeded = [run(model, [0], **options).tokens for _ in range(2)]
    mx.random.seed(1)
    assert unseeded == [run(model, [0], **options).tokens for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def generate_in_another_thread() -> None:
    target = tiny_llama()
    drafters = (
        *(None, PromptLookup(3, min_ngram=1), DraftModel(target, TOKENIZER, 3)),
        MTPDrafter(tiny_head(target, [5, 3, 9]), 3),
    )

    def texts():
        options = {"sampling": GREEDY, "max_tokens": 12, "seed": 0}
        return [run(target, drafter=drafter, **options).tokens for drafter in drafters]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(texts).result() == texts()


def test_generating_in_another_thread():
    # A process of its own, in which the main thread has evaluated no array of the loop before. It
    # ends without Python's own end: MLX's compile cache takes the GIL when its thread ends, and
    # aborts the process if that comes late.
    code = "import os, test_generate; test_generate.generate_in_another_thread(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


# Errors


@pytest.mark.parametrize(("num_draft_tokens", "slot"), [(3, 0), (2, 1)])
def test_nan_of_the_target(num_draft_tokens, slot):
    table = mx.array(counting_model().table)
    table[:, 5, 3] = mx.nan
    target = TableModel(table)
    drafter = DraftModel(counting_model(), TOKENIZER, num_draft_tokens)
    cache = make_prompt_cache(target)
    tokens = []
    with pytest.raises(NonFiniteLogitsError, match=rf"target .* sequence 0, slot {slot}") as caught:
        for item in stream_generate(target, TOKENIZER, [1], drafter=drafter, prompt_cache=cache):
            tokens.append(item.token)
    assert tokens == [2, 3, 4, 5]
    assert cached_tokens(cache) == [1, 2, 3, 4, 5]
    error = caught.value
    assert (error.sequence, error.slot, error.side) == (0, slot, "target")
    with pytest.raises(NonFiniteLogitsError) as caught:
        run(target, [1], drafter=drafter)
    assert caught.value.partial.tokens == tokens and caught.value.partial.finish_reason is None


def fail_on_nan():
    target = TableModel(counting_model().table * mx.where(mx.arange(16) == 5, mx.nan, 1)[:, None])
    return run(target, [1], drafter=FixedDrafter([2, 3, 4, 5]))


def check_copied_error(error):
    assert isinstance(error, NonFiniteLogitsError)
    assert (error.sequence, error.slot, error.side) == (0, 4, "target")
    assert re.match(r"\[stream_generate\] target logits: .* sequence 0, slot 4$", str(error))
    assert error.partial.tokens == [2, 3, 4, 5]
    assert error.partial.statistics.generated_tokens == 4


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_the_error_can_be_copied_and_pickled(copied):
    with pytest.raises(NonFiniteLogitsError) as caught:
        fail_on_nan()
    check_copied_error(caught.value)
    check_copied_error(copied(caught.value))


@pytest.mark.prove
def test_the_error_comes_out_of_a_process_pool():
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        check_copied_error(pool.submit(fail_on_nan).exception())


@pytest.mark.parametrize(("num_draft_tokens", "slot"), [(3, 0), (2, 1)])
def test_nan_of_the_draft_model(num_draft_tokens, slot):
    table = mx.array(counting_model().table)
    table[:, 5, 3] = mx.nan
    drafter = DraftModel(TableModel(table), TOKENIZER, num_draft_tokens)
    with pytest.raises(NonFiniteLogitsError, match=rf"draft .* slot {slot}") as caught:
        run(counting_model(), [1], drafter=drafter)
    assert caught.value.side == "draft"
    assert caught.value.partial.tokens == [2, 3, 4, 5]


@pytest.mark.parametrize("temperature", [0, mx.array(0.0), mx.array(0.0, mx.float16)])
def test_nan_of_the_draft_model_where_the_target_decides_alone(temperature):
    table = mx.array(counting_model().table)
    table[:, 5, 3] = mx.nan
    drafter = DraftModel(TableModel(table), TOKENIZER, 3)
    options = {"sampling": Sampling(temperature=temperature), "max_tokens": 10}
    result = run(counting_model(), [1], drafter=drafter, **options)
    assert result.tokens == run(counting_model(), [1], **options).tokens
    # The cycle that starts at 5 has no draft.
    assert result.sources == ["draft"] * 3 + ["bonus"] * 2 + ["draft"] * 3 + ["bonus"] * 2
    assert result.statistics.slot_drafted == result.statistics.slot_accepted == [2, 2, 2]


def test_nan_that_no_token_depends_on():
    # The draft model goes from 1 to 5, which is rejected, and after 5 its logits are NaN.
    table = mx.array(counting_model().table)
    table[:, 1] = 60.0 * (mx.arange(16) == 5)
    table[:, 5] = mx.nan
    drafter = DraftModel(TableModel(table), TOKENIZER, 3)
    assert run(counting_model(), [1], drafter=drafter, max_tokens=1 + 3).tokens == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": []}, ValueError, r"prompt: expected at least one token"),
        ({"prompt": [1, 99]}, ValueError, r"prompt: expected ids in \[0, 16\), got 99"),
        ({"prompt": [-1]}, ValueError, r"prompt: expected ids in \[0, 16\), got -1"),
        ({"prompt": mx.array([[1, 2]])}, ValueError, r"prompt: .* got .*int32 of shape \[1, 2\]"),
        ({"prompt": mx.array([1.0])}, ValueError, r"prompt: expected integers"),
        ({"prompt": 3}, TypeError, r"prompt: expected a string, .* got int"),
        ({"prompt": b"w1"}, TypeError, r"prompt: expected a string, .* got bytes"),
        ({"prompt": [1, True]}, TypeError, r"prompt: expected integers, got True"),
        ({"prompt": [1, 2.0]}, TypeError, r"prompt: expected integers, got 2.0"),
        ({"stop_tokens": "</s>"}, TypeError, r"stop_tokens: expected token ids, got str"),
        ({"stop_tokens": ["</s>"]}, TypeError, r"stop_tokens: expected integers, got '</s>'"),
        ({"stop_tokens": [True]}, TypeError, r"stop_tokens: expected integers, got True"),
        ({"stop_tokens": 2}, TypeError, r"stop_tokens: expected token ids, got int"),
        ({"max_tokens": 0}, ValueError, r"max_tokens: expected at least 1, got 0"),
        ({"max_tokens": 2.5}, TypeError, r"max_tokens: expected an integer, got float"),
        ({"seed": "x"}, TypeError, r"seed: expected an integer, got str"),
        ({"drafter": "lookup"}, TypeError, r"drafter: expected .*Drafter, got str"),
        ({"sampling": 0.5}, TypeError, r"sampling: expected exactspec.Sampling, got float"),
        ({"sampling": Sampling(top_p=2.0)}, ValueError, r"sampling.top_p: expected .* got 2.0"),
        (
            {"sampling": Sampling(temperature=mx.array(-1.0))},
            ValueError,
            r"sampling: expected a finite temperature >= 0, .* got an array",
        ),
    ],
)
def test_bad_arguments(options, error, message):
    options = {"prompt": [1, 2], **options}
    with pytest.raises(error, match=rf"\[stream_generate\] {message}"):
        run(counting_model(), **options)


def test_ids_of_other_types():
    for prompt in ([np.int64(1), np.int32(2)], np.array([1, 2]), (1, 2), mx.array([1, 2])):
        for stop_tokens in ([np.int64(5)], np.array([5]), {5}):
            result = run(counting_model(), prompt, stop_tokens=stop_tokens)
            assert result.tokens == [3, 4, 5] and result.finish_reason == "stop"


@pytest.mark.parametrize(
    "make",
    [
        lambda: PromptLookup(3, min_ngram=1),
        lambda: DraftModel(tiny_llama(noise=0.02), TOKENIZER, 3),
        lambda: Adaptive(DraftModel(tiny_llama(noise=0.02), TOKENIZER, 3)),
        lambda: MTPDrafter(tiny_head(tiny_llama()), 3),
        lambda: Hybrid(PromptLookup(3, min_ngram=1), MTPDrafter(tiny_head(tiny_llama()), 3)),
    ],
    ids=["lookup", "model", "adaptive", "head", "hybrid"],
)
def test_a_drafter_refuses_two_texts_at_once(make):
    target, drafter = tiny_llama(), make()
    options = {"drafter": drafter, "sampling": GREEDY, "max_tokens": 20, "stop_tokens": NO_STOP}
    cache = make_prompt_cache(target)
    first = stream_generate(target, TOKENIZER, PROMPT, prompt_cache=cache, **options)
    tokens = [next(first).token]
    second = stream_generate(target, TOKENIZER, [9, 8], **options)
    others = [next(second).token]
    with pytest.raises(
        RuntimeError, match=r"\[stream_generate\] drafter: expected .* got a[n]? [ADHMP]"
    ):
        for item in first:
            tokens.append(item.token)
    # The first text ended after the cycle that it was in, the second goes on undisturbed.
    assert cache[0].offset == len(PROMPT + tokens)
    others += [item.token for item in second]
    fresh = run(target, [9, 8], drafter=make(), sampling=GREEDY, max_tokens=20)
    assert others == fresh.tokens


def test_too_many_draft_tokens():
    class Eager(FixedDrafter):
        def draft(self, limit, key):
            return super().draft(limit + 1, key)

    for max_tokens, limit in ((5, 4), (1000, 254)):
        message = (
            rf"\[stream_generate\] drafter: expected at most {limit} .* Eager, got {limit + 1}"
        )
        with pytest.raises(ValueError, match=message):
            run(counting_model(), [1], drafter=Eager([2] * 300), max_tokens=max_tokens)
    with pytest.raises(ValueError, match="expected at most 4 .* Eager, got 5"):
        run(counting_model(), [1], drafter=Adaptive(Eager([2] * 300)))


def test_bad_arguments_of_drafters():
    for options in ({"num_draft_tokens": 0}, {"min_ngram": 0}, {"max_ngram": 1, "min_ngram": 2}):
        with pytest.raises(ValueError, match=r"\[PromptLookup\] \w+: expected"):
            PromptLookup(**options)
    for num_draft_tokens in (0, 255):
        with pytest.raises(ValueError, match=r"\[DraftModel\] num_draft_tokens: expected"):
            DraftModel(counting_model(), TOKENIZER, num_draft_tokens)
    with pytest.raises(TypeError, match=r"\[PromptLookup\] num_draft_tokens: expected an integer"):
        PromptLookup(2.0)
    with pytest.raises(TypeError, match=r"\[Adaptive\] drafter: expected .*Drafter, got int"):
        Adaptive(4)
    drafter = DraftModel(counting_model(), toy_tokenizer(31))
    with pytest.raises(ValueError, match=r"\[DraftModel\] tokenizer: expected the target's"):
        run(counting_model(), drafter=drafter)


# One wait for the device per cycle


@pytest.mark.parametrize("kind", ["plain", "lookup", "model", "adaptive model", "head"])
def test_one_wait_per_cycle(kind, monkeypatch):
    target = tiny_llama()
    draft_model = DraftModel(tiny_llama(noise=0.02), TOKENIZER, 3)
    drafter = {
        "plain": None,
        "lookup": PromptLookup(3, min_ngram=1),
        "model": draft_model,
        "adaptive model": Adaptive(draft_model),
        "head": Hybrid(PromptLookup(3), MTPDrafter(tiny_head(target, [5, 3, 9]), 3)),
    }[kind]
    evaluate, evaluated = mx.eval, []

    def flat(arrays):
        for entry in arrays:
            if isinstance(entry, (list, tuple)):
                yield from flat(entry)
            elif entry is not None:
                yield entry

    def counting_eval(*arrays):
        evaluated.append(list(flat(arrays)))
        evaluate(*arrays)

    def forbidden(*_, **__):
        raise AssertionError("waits for the device")

    def only_after_eval(read):
        def wrapper(self, *args):
            assert any(self is array for array in evaluated[-1]), "read before it was evaluated"
            return read(self, *args)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", counting_eval)
        patch.setattr(mx, "synchronize", forbidden)
        for name in ("tolist", "item"):
            patch.setattr(mx.array, name, only_after_eval(getattr(mx.array, name)))
        for name in ("__bool__", "__int__", "__float__", "__index__", "__repr__", "__array__"):
            if hasattr(mx.array, name):
                patch.setattr(mx.array, name, forbidden)
        stream = stream_generate(
            target,
            TOKENIZER,
            PROMPT,
            drafter=drafter,
            max_tokens=30,
            stop_tokens=NO_STOP,
            seed=3,
            logprobs="raw",
        )
        first = next(stream)
        prefills = 1 + (kind not in ("plain", "lookup"))
        assert len(evaluated) == prefills + 1
        tokens = [first, *stream]
    statistics = first.statistics
    assert len(tokens) == 30 and (kind == "plain" or statistics.accepted > 0)
    assert len(evaluated) == prefills + statistics.cycles


# Drafters


def looked_up(text, max_ngram, min_ngram, count):
    """What prompt lookup must propose, by plain search."""
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                copied = list(text)
                for position in range(start + n, start + n + count):
                    copied.append(copied[position])
                return copied[len(text) :]
    return []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (3, 2), (4, 4)])
def test_prompt_lookup_against_plain_search(max_ngram, min_ngram):
    random = np.random.default_rng(0)
    drafter = PromptLookup(5, max_ngram=max_ngram, min_ngram=min_ngram)
    found = 0
    for vocab_size in (2, 3, 6):
        text = random.integers(vocab_size, size=3).tolist()
        drafter.begin(list(text), **BEGIN)
        for _ in range(60):
            draft = drafter.draft(4, mx.random.key(0))
            expected = looked_up(text, max_ngram, min_ngram, 4)
            assert draft.draft_tokens.tolist() == expected
            found += bool(expected)
            new = random.integers(vocab_size, size=random.integers(1, 4)).tolist()
            drafter.extend(list(new), 0)
            text += new
    assert found > 30


def test_prompt_lookup_goes_on_with_a_repetition():
    drafter = PromptLookup(7, max_ngram=2)
    drafter.begin([1, 2, 3, 1, 2], **BEGIN)
    assert drafter.draft(7, mx.random.key(0)).draft_tokens.tolist() == [3, 1, 2, 3, 1, 2, 3]
    assert drafter.draft(2, mx.random.key(0)).draft_tokens.tolist() == [3, 1]


def test_what_a_drafter_observes():
    class Observer(FixedDrafter):
        seen = []

        def observe(self, num_drafts, num_accepted, seconds):
            self.seen.append((num_drafts, num_accepted, seconds))

    statistics = run(
        counting_model(), [1], drafter=Observer([2, 3, -1, 9]), max_tokens=6
    ).statistics
    assert [cycle[:2] for cycle in Observer.seen] == [(2, 2), (2, 0), (1, 0), (0, 0)]
    assert sum(cycle[2] for cycle in Observer.seen) == statistics.generation_time


def test_an_adaptive_drafter_asks_for_what_pays(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            self.now += 1
            return self.now

    class Counter(Drafter):
        """Counts on from the text by ``step``, each token taking half the time of a forward."""

        num_draft_tokens = 6

        def __init__(self, step):
            self.step = step
            self.asked = []

        def begin(self, prompt, **_):
            self.last = prompt[-1]

        def draft(self, limit, key):
            self.asked.append(limit)
            clock.now += 0.5 * limit
            tokens = [(self.last + self.step * (1 + i)) % 16 for i in range(limit)]
            return Draft(mx.array(tokens, mx.int32))

        def extend(self, tokens, num_accepted):
            self.last = (self.last + len(tokens)) % 16

    clock = Clock()
    monkeypatch.setattr(generate_module, "time", clock)
    right, wrong = Counter(1), Counter(2)
    for drafter in (right, wrong):
        result = run(counting_model(), [1], drafter=Adaptive(drafter), max_tokens=200)
        assert result.tokens == [(2 + i) % 16 for i in range(200)]
    assert right.asked.count(6) > 0.6 * len(right.asked)
    assert len(wrong.asked) < 20


def test_a_drafter_serves_one_text_after_another():
    model = tiny_llama()
    for drafter in (
        PromptLookup(3),
        DraftModel(tiny_llama(noise=0.02), TOKENIZER, 3),
        MTPDrafter(tiny_head(model, [5, 3, 9]), 3),
    ):
        texts = [
            run(model, prompt, drafter=drafter, seed=4, max_tokens=20).tokens
            for prompt in (PROMPT, [9, 8], PROMPT)
        ]
        assert texts[0] == texts[2] != texts[1]

"""Drafting from the target's hidden states: the heads, their entries, and the text's exactness."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from exactspec import Cascade, Sampling
from exactspec import cached_model as cached_model_module
from exactspec.cached_model import CachedModel
from exactspec.drafters import (
    Adaptive,
    Draft,
    Drafter,
    DraftModel,
    Hybrid,
    MTPDrafter,
    PromptLookup,
)
from exactspec.generate import NonFiniteLogitsError, generate, stream_generate
from exactspec.heads import DraftHead, MiMoHead, load_default_head
from exactspec.models import load_default_model
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import mimo
from mlx_lm.models.cache import make_prompt_cache
from test_generate import (
    FixedDrafter,
    assert_distributed,
    counting_model,
    interrupt_eval,
    random_table,
)
from toy_models import (
    LLAMA_CONFIG,
    NEAR_TIE,
    HiddenTableModel,
    TableHead,
    TableModel,
    cached_tokens,
    first_difference_gap,
    save_head,
    tiny_head,
    tiny_llama,
    toy_tokenizer,
)

GREEDY = Sampling(temperature=0)
PROMPT = [3, 7, 1, 4, 3, 7, 1]
TOKENIZER = toy_tokenizer()


def run(model, prompt=PROMPT, **options):
    options.setdefault("stop_tokens", ())
    return generate(model, TOKENIZER, prompt, **options)


def hidden_counting_model(vocab_size: int = 16) -> HiddenTableModel:
    return HiddenTableModel(counting_model(vocab_size).table)


def tiny_mimo(vocab_size: int = 8) -> tuple[mimo.Model, dict[str, mx.array]]:
    """A random model, and all tensors of its checkpoint."""
    mx.random.seed(3)
    model = mimo.Model(
        mimo.ModelArgs(**{**LLAMA_CONFIG, "model_type": "mimo"}, vocab_size=vocab_size)
    )
    head = MiMoHead(model)
    for module in (model, head):
        module.update(tree_map(lambda w: 4 * w if w.ndim == 2 else w, module.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    weights |= {f"model.mtp_layers.0.{k}": v for k, v in tree_flatten(head.parameters())}
    mx.eval(weights)
    return model, weights


class Sometimes(Drafter):
    """Proposes nothing in most cycles, else what it is told, one token of them wrong."""

    def __init__(self, text):
        self.text = text

    def begin(self, prompt, **_):
        self.at = self.cycle = 0

    def draft(self, limit, key):
        self.cycle += 1
        if self.cycle % 3:
            return Draft(mx.zeros((0,), mx.int32))
        tokens = self.text[self.at : self.at + min(limit, 4)]
        return Draft(mx.array(tokens[:-1] + [(t + 1) % 8 for t in tokens[-1:]], mx.int32))

    def extend(self, tokens, num_accepted):
        self.at += len(tokens)


class Recorded(MTPDrafter):
    """Keeps every draft with the text that it continues."""

    def begin(self, prompt, **options):
        super().begin(prompt, **options)
        self.drafts = []

    def draft(self, limit, key):
        text = list(self._text)
        draft = super().draft(limit, key)
        # Entries of what the target and the head know of the text, and of the drafts but the last.
        assert self._cache[0].offset == len(text) - 1 + max(draft.draft_tokens.size - 1, 0) or (
            draft.draft_tokens.size == 0
        )
        self.drafts.append((text, draft))
        return draft


def rows_from_scratch(target, head, text, drafted):
    """The head's rows after the text, and after each drafted token but the last, over all ids."""
    hidden = target.model(mx.array([text[:-1]]))[0]
    cache = head.make_cache()
    outputs = head(mx.array(text[1:]), hidden, cache)[-1:]
    rows = []
    for i in range(len(drafted)):
        if i:
            outputs = head(mx.array([drafted[i - 1]]), outputs, cache)
        rows.append(head.logits(outputs)[0])
    return np.array(mx.stack(rows))


# Entries: what a draft is made of


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *itertools.product(
            ("alone", "behind another", "adaptive", "two layers"), ("token", "coupled")
        ),
        ("behind trees", "token"),
    ],
)
@pytest.mark.quick(prompt=[[5, 2], PROMPT])
@pytest.mark.parametrize("prompt", [[5], [5, 2], PROMPT, PROMPT * 3], ids=len)
def test_rows_are_those_of_a_head_that_sees_the_text_only(
    kind, prompt, rule, erratic_clock, monkeypatch, figure
):
    """Whatever was accepted, rejected or left out: no entry is stale, missing or misplaced."""
    monkeypatch.setattr(cached_model_module, "PREFILL_CHUNK", 4)
    target = tiny_llama(8)
    whole = tiny_head(target, layers=1 + (kind == "two layers"))
    # Ids in no order, one of them twice.
    head = tiny_head(target, [4, 1, 6, 1], layers=1 + (kind == "two layers"))
    head.update(whole.parameters())
    options = {"max_tokens": 60, "rule": rule, "seed": 2, "sampling": Sampling(2.0, top_k=6)}
    recorded = Recorded(head, 3)
    drafter = {
        "behind another": Hybrid(Sometimes(run(target, prompt, **options).tokens), recorded),
        "adaptive": Adaptive(recorded),
        "behind trees": Hybrid(PromptLookup(3, num_branches=2), recorded),
    }.get(kind, recorded)
    statistics = run(target, prompt, drafter=drafter, **options).statistics
    assert statistics.accepted > 3 and statistics.accepted < statistics.drafted
    drafts = [(text, draft) for text, draft in recorded.drafts if draft.draft_tokens.size]
    assert len(recorded.drafts) - len(drafts) == (len(prompt) == 1)
    largest = 0
    for text, draft in drafts:
        vocab = np.arange(8) if rule == "coupled" else np.array(draft.draft_vocab)
        if rule == "coupled":
            used = set(text) | {4, 1, 6}
            row = np.array(draft.draft_logits)
            assert all(np.isfinite(row[:, i]).all() == (i in used) for i in range(row.shape[1]))
            vocab = np.array(sorted(used))
            row = row[:, vocab]
        else:
            assert sorted(vocab.tolist()) == vocab.tolist() == sorted([1, *(set(text) | {4, 1, 6})])
            row = np.array(draft.draft_logits)
        drafted = draft.draft_tokens.tolist()
        expected = rows_from_scratch(target, whole, text, drafted)[:, vocab]
        largest = max(largest, np.abs(row - expected).max())
    figure("largest difference of a logit", largest)
    # Its large weights make up to 1e-3 of rounding; a wrong one of the last tokens moves it by 0.1.
    assert largest < 1e-2
    if kind in ("behind another", "adaptive"):
        assert len(drafts) < statistics.cycles - 5


def test_nothing_is_drafted_from_what_a_prompt_cache_held():
    """A head sees the new prompt and what follows, and the text goes on as it should."""
    target = tiny_llama(8)
    cache = make_prompt_cache(target)
    recorded = Recorded(tiny_head(target), 3)
    options = {"max_tokens": 12, "drafter": recorded, "sampling": GREEDY}
    text = list(PROMPT)
    for more in ([], [5], [2, 6, 4]):
        text += more
        result = run(target, more or PROMPT, prompt_cache=cache, **options)
        assert result.tokens == run(target, text, max_tokens=12, sampling=GREEDY).tokens
        text += result.tokens
        assert cache[0].offset == len(text)
        before = text[: len(text) - len(result.tokens) - len(more or PROMPT)]
        for new, draft in recorded.drafts:
            if draft.draft_tokens.size == 0:
                assert new == more == [5]
                continue
            hidden = target.model(mx.array([before + new[:-1]]))[0, len(before) :]
            head = recorded.head
            outputs = head(mx.array(new[1:]), hidden, head.make_cache())[-1:]
            row = np.array(head.logits(outputs)[0])
            np.testing.assert_allclose(np.array(draft.draft_logits[0]), row, atol=1e-3)


@pytest.mark.parametrize("draft_vocab", [None, [6, 1, 3, 0, 2]], ids=["all ids", "some ids"])
@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_a_head_that_knows_the_target_is_always_right(rule, draft_vocab):
    """It is not where noise is named by column, or an entry is paired with another token."""
    table = random_table(8)
    if draft_vocab is not None:
        # The target keeps to these ids, each in its own column of the draft.
        table[:, :, mx.array([4, 5, 7])] = -1e4
    target = HiddenTableModel(table)
    for sampling in (Sampling(), Sampling(0.5, top_k=3), GREEDY):
        drafter = MTPDrafter(TableHead(target, draft_vocab), 3)
        options = {"max_tokens": 40, "sampling": sampling, "rule": rule, "seed": 0}
        result = run(target, [0, 3], drafter=drafter, **options)
        # Rounding may reject a draft whose two probabilities are the same.
        assert result.statistics.acceptance_rate > 0.97
        assert result.statistics.cycles <= 12


def test_entries_hold_the_text_whatever_is_asked():
    """Cycles of another drafter and without a draft: the entries follow, at most some late."""
    target = hidden_counting_model()
    head = TableHead(target)
    text = [(2 + i) % 16 for i in range(100)]

    class Watched(MTPDrafter):
        late = 0

        def extend(self, tokens, num_accepted):
            super().extend(tokens, num_accepted)
            behind = len(self._text) - 1 - self._cache[0].offset
            assert cached_tokens(self._cache) == self._text[1 : 1 + self._cache[0].offset]
            self.late = max(self.late, behind)

    class Never(Drafter):
        def draft(self, limit, key):
            return Draft(mx.array([0], mx.int32))

    for first in (Never(), PromptLookup(3, min_ngram=1)):
        drafter = Watched(head, 3)
        result = run(target, [1], drafter=Hybrid(first, drafter), max_tokens=100)
        assert result.tokens == text
        assert 16 <= drafter.late <= 16 + 4
    drafter = Watched(head, 3)
    assert run(target, [1], drafter=drafter, max_tokens=100).tokens == text
    assert drafter.late == 4  # three drafts and one token more


def test_another_drafter_is_asked_where_the_first_has_nothing():
    class Scripted(Drafter):
        def __init__(self, drafts):
            self.drafts, self.calls = drafts, []

        def draft(self, limit, key):
            return Draft(mx.array(self.drafts.pop(0), mx.int32))

        def observe(self, num_drafts, num_accepted, seconds):
            self.calls.append((num_drafts, num_accepted))

        def extend(self, tokens, num_accepted):
            self.calls.append((tokens, num_accepted))

    first = Scripted([[2, 3], [], [], [7]])
    second = Scripted([[5, 6, 9], []])
    result = run(counting_model(), [1], drafter=Hybrid(first, second), max_tokens=9)
    assert result.tokens == list(range(2, 11))
    # Whoever drafted learns what became of it; both learn the text, and that a cycle passed.
    assert first.calls == [
        *((2, 2), ([2, 3, 4], 2), (0, 0), ([5, 6, 7], 0), (0, 0), ([8], 0)),
        *((1, 0), ([9], 0), (0, 0), ([10], 0)),
    ]
    assert second.calls == [
        *((0, 0), ([2, 3, 4], 0), (3, 2), ([5, 6, 7], 2), (0, 0), ([8], 0)),
        *((0, 0), ([9], 0), (0, 0), ([10], 0)),
    ]


# Exactness


@pytest.mark.parametrize("kind", ["llama", "some ids", "mimo"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_greedy_text_is_that_of_plain_decoding(kind, num_draft_tokens, figure):
    if kind == "mimo":
        target, _ = tiny_mimo()
        head = MiMoHead(target)
    else:
        target = tiny_llama()
        head = tiny_head(target, None if kind == "llama" else [1, 5, 9, 30])
    plain = run(target, max_tokens=60, sampling=GREEDY)
    lookup = PromptLookup(3, min_ngram=1)
    for drafter in (
        MTPDrafter(head, num_draft_tokens),
        MTPDrafter(head, num_draft_tokens, sampling=Sampling(1.5)),
        Adaptive(MTPDrafter(head, num_draft_tokens)),
        Hybrid(lookup, MTPDrafter(head, num_draft_tokens)),
    ):
        other = run(target, max_tokens=60, sampling=GREEDY, drafter=drafter)
        gap = first_difference_gap(target, PROMPT, plain.tokens, other.tokens)
        if gap is not None:
            figure("gap of the two best logits at the first difference", gap)
            assert gap < NEAR_TIE
        assert other.statistics.drafted > (0 if isinstance(drafter, Adaptive) else 30)


@pytest.mark.quick(num_pairs=[1_000])
@pytest.mark.parametrize(
    "kind, num_pairs",
    [
        ("some ids", 1_000),
        *((k, 3_000) for k in ("some ids", "hot", "block", "coupled", "adaptive", "behind lookup")),
    ],
)
def test_joint_distribution_of_consecutive_tokens(kind, num_pairs, erratic_clock):
    vocab_size, length = 8, 8
    target = HiddenTableModel(random_table(vocab_size))
    # Short texts, so that most of them have ids that are not in the vocabulary.
    head = tiny_head(target, [6, 1, 3, 1])
    drafter = MTPDrafter(head, 3, sampling=Sampling(2.5, top_k=3) if kind == "hot" else None)
    if kind == "adaptive":
        drafter = Adaptive(drafter)
    elif kind == "behind lookup":
        drafter = Hybrid(PromptLookup(2, min_ngram=1), drafter)
    rule = kind if kind in ("block", "coupled") else "token"
    # The first token follows one at an odd position.
    results = [
        run(target, [0, 3, 0], drafter=drafter, rule=rule, max_tokens=length, seed=seed)
        for seed in range(2 * num_pairs // length)
    ]
    first = mx.softmax(target.table[0, 0]).tolist()
    second = np.array(mx.softmax(target.table[1], axis=1))
    joint = np.array(first)[:, None] * second
    tokens = np.array([result.tokens for result in results])
    pairs = tokens.reshape(-1, 2)
    assert_distributed(pairs[:, 0] * vocab_size + pairs[:, 1], joint)
    across = tokens[:, 1:-1].reshape(-1, 2)
    assert_distributed(
        across[:, 0] * vocab_size + across[:, 1], joint.sum(0)[:, None] * np.array(first)
    )
    sources = [source for result in results for source in result.sources]
    assert min(sources.count(source) for source in ("draft", "residual", "bonus")) > num_pairs / 15


def test_coupled_text_does_not_depend_on_the_head():
    """Bit for bit: a model of fixed logits, whose forwards do not round."""
    table = 2 * mx.random.normal((2, 16, 16), key=mx.random.key(3))
    target = HiddenTableModel(table)
    other = tiny_head(target, [3, 2, 9])
    for sampling in (Sampling(), Sampling(0.6, top_k=5), Sampling(2.0, top_p=0.9, min_p=0.05)):
        options = {"max_tokens": 50, "sampling": sampling, "rule": "coupled", "seed": 5}
        plain = run(target, **options)
        drafters = [
            *(MTPDrafter(TableHead(target), count) for count in (1, 2, 7)),
            *(MTPDrafter(other, count) for count in (1, 4)),
            MTPDrafter(other, 3, sampling=GREEDY),
            Adaptive(MTPDrafter(other, 4)),
            Hybrid(PromptLookup(4, min_ngram=1), MTPDrafter(other, 2)),
        ]
        for drafter in drafters:
            assert run(target, drafter=drafter, **options).tokens == plain.tokens
    assert run(target, **{**options, "seed": 6}).tokens != plain.tokens


# The model's hidden states


class Capped(nn.Module):
    """Does more to the logits than project, and calls its language model by that name."""

    def __init__(self, inner):
        super().__init__()
        self.language_model = inner

    @property
    def layers(self):
        return self.language_model.layers

    def __call__(self, tokens, cache=None):
        return 2 * mx.tanh(self.language_model(tokens, cache=cache) / 2)


def test_hidden_states_of_a_wrapped_model():
    inner = tiny_llama()
    target = Capped(inner)
    seen = []
    model = CachedModel(target)
    model.hand_over_hidden_states("test", seen.append)
    model.settle(PROMPT, 0)
    model.prefill()
    logits = model.feed(mx.array([5, 6], mx.int32))
    model.settle([5, 9], 1)
    whole = [*PROMPT, 5, 6]
    np.testing.assert_allclose(
        np.array(logits), np.array(target(mx.array([whole]))[0, -3:]), atol=1e-4
    )
    assert [rows.shape[0] for rows in seen] == [len(PROMPT) - 1, 2]
    hidden = np.array(inner.model(mx.array([whole]))[0])
    np.testing.assert_allclose(np.array(mx.concatenate(seen)), hidden[:-1], atol=1e-4)
    # The caller's model is what it was.
    assert target.language_model is inner and type(inner.model) is type(tiny_llama().model)
    assert dict(tree_flatten(target.parameters())).keys() == {
        f"language_model.{k}" for k, _ in tree_flatten(inner.parameters())
    }


@pytest.mark.parametrize("path", [[], [0], [1, 4], [0, 2, 5]])
def test_hidden_states_of_an_accepted_path(path):
    target, seen = tiny_llama(), []
    model = CachedModel(target)
    model.hand_over_hidden_states("test", seen.append)
    model.settle(PROMPT, 0)
    model.prefill()
    tokens = [10, 11, 12, 13, 14, 15]
    model.feed_tree(mx.array(tokens[:2]), [-1, -1])
    model.feed_tree(mx.array(tokens[2:]), [0, 2, 1, 2])
    text = [tokens[i] for i in path]
    model.settle([*text, 20], len(path), path)
    hidden = np.array(target.model(mx.array([PROMPT + text]))[0])
    np.testing.assert_allclose(np.array(mx.concatenate(seen)), hidden, atol=1e-4)


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["plain", "lookup"])
def test_other_drafters_cost_no_hidden_states(drafter, monkeypatch):
    def refuse(*_):
        raise AssertionError("asked for hidden states")

    monkeypatch.setattr(CachedModel, "hand_over_hidden_states", refuse)
    assert run(tiny_llama(), drafter=drafter, max_tokens=4).statistics.generated_tokens == 4


# Statistics


@pytest.mark.parametrize(
    ("draft", "parents", "options", "drafted", "reached", "accepted"),
    [
        # Cycles: 2 3 4, 5 of a draft of two tokens, 6 of one, 7 without.
        ([2, 3, 9], None, {"max_tokens": 6}, [3, 2, 1], [3, 1, 1], [1, 1, 0]),
        # No slot for the token behind a draft that is accepted whole.
        ([2, 3], None, {"max_tokens": 3}, [1, 1], [1, 1], [1, 1]),
        # What lies behind a stop token is no text, whether it was drafted or not.
        ([2, 3, 4, 5], None, {"stop_tokens": [3]}, [1] * 4, [1, 1, 0, 0], [1, 1, 0, 0]),
        ([2, 9, 4, 5], None, {"stop_tokens": [3]}, [1] * 4, [1, 1, 0, 0], [1, 0, 0, 0]),
        # A path that ends where another one goes on.
        ([2, 9, 3], [-1, -1, 1], {"stop_tokens": [3]}, [1, 1], [1, 0], [1, 0]),
    ],
)
def test_reached_slots(draft, parents, options, drafted, reached, accepted):
    class Fixed(FixedDrafter):
        proposes_trees = True

        def draft(self, limit, key):
            return super().draft(limit, key)._replace(parents=parents)

    statistics = run(counting_model(), [1], drafter=Fixed(draft), **options).statistics
    assert statistics.slot_drafted == drafted
    assert statistics.slot_reached == reached
    assert statistics.slot_accepted == accepted


# Ends of a text


@pytest.mark.parametrize("kind", ["alone", "behind lookup", "adaptive"])
def test_the_targets_cache_holds_the_text_however_it_ends(kind, monkeypatch):
    target, text = hidden_counting_model(), [(3 + i) % 16 for i in range(12)]

    def make():
        drafter = MTPDrafter(TableHead(target), 3)
        return {
            "behind lookup": Hybrid(PromptLookup(2, min_ngram=1), drafter),
            "adaptive": Adaptive(drafter),
        }.get(kind, drafter)

    for end in range(1, 9):
        cache = make_prompt_cache(target.model)
        result = run(target, [1, 2], drafter=make(), max_tokens=end, prompt_cache=cache)
        assert result.tokens == text[:end] and cached_tokens(cache) == [1, 2, *text[:end]]
        cache = make_prompt_cache(target.model)
        run(target, [1, 2], drafter=make(), stop_tokens=[2 + end], prompt_cache=cache)
        assert cached_tokens(cache) == [1, 2, *text[:end]]
        for interrupted in (False, True):
            cache = make_prompt_cache(target.model)
            stream = stream_generate(
                target, TOKENIZER, [1, 2], drafter=make(), max_tokens=12, prompt_cache=cache
            )
            tokens = [next(stream).token for _ in range(end)]
            if interrupted:
                interrupt_eval(monkeypatch, 0)
                with pytest.raises(KeyboardInterrupt):
                    for item in stream:
                        tokens.append(item.token)
            stream.close()
            assert tokens == text[: len(tokens)]
            assert cached_tokens(cache) == [1, 2, *tokens]


@pytest.mark.parametrize("after", range(6))
def test_interrupted_while_reading_the_prompt(after, monkeypatch):
    monkeypatch.setattr(cached_model_module, "PREFILL_CHUNK", 3)
    target = hidden_counting_model()
    cache = make_prompt_cache(target.model)
    drafter = MTPDrafter(TableHead(target), 3)
    stream = stream_generate(
        target, TOKENIZER, list(range(1, 10)), drafter=drafter, prompt_cache=cache
    )
    interrupt_eval(monkeypatch, after)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert cached_tokens(cache) == list(range(1, 10))
    # The drafter is as good as new.
    assert run(target, [1, 2], drafter=drafter, max_tokens=8).tokens == list(range(3, 11))


# The heads


def rms_norm(x, weight, eps=1e-5):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotated(x, theta=10000.0):
    """Rotary embedding of ``[n, heads, size]``, pairs half a vector apart, in float64."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    turned = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return np.concatenate(turned, axis=-1)


def layer_by_hand(x, w, prefix, heads=4, kv_heads=2):
    n, size = x.shape[0], x.shape[1] // heads
    y = rms_norm(x, w[f"{prefix}input_layernorm.weight"])

    def projected(name, count):
        bias = w.get(f"{prefix}self_attn.{name}_proj.bias", 0)
        z = y @ w[f"{prefix}self_attn.{name}_proj.weight"].T + bias
        return z.reshape(n, count, size)

    q, k, v = (
        rotated(projected("q", heads)),
        rotated(projected("k", kv_heads)),
        projected("v", kv_heads),
    )
    k, v = (np.repeat(z, heads // kv_heads, axis=1) for z in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = (
        x
        + np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
        @ w[f"{prefix}self_attn.o_proj.weight"].T
    )
    y = rms_norm(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


@pytest.mark.parametrize("kind", ["draft head", "mimo"])
def test_outputs_by_hand(kind):
    if kind == "mimo":
        target, _ = tiny_mimo()
        head = MiMoHead(target)
    else:
        target = tiny_llama(8)
        head = tiny_head(target, [5, 2], layers=2)
    mx.random.seed(1)
    # Norms and biases that are not 1 and 0.
    head.update(tree_map(lambda w: w + 0.3 * mx.random.normal(w.shape), head.parameters()))
    hidden = mx.random.normal((5, 32))
    tokens = [3, 7, 7, 0, 2]
    cache = head.make_cache()
    pieces = [head(mx.array(tokens[i:j]), hidden[i:j], cache) for i, j in ((0, 3), (3, 4), (4, 5))]
    outputs = mx.concatenate(pieces)

    w = {k: np.array(v, np.float64) for k, v in tree_flatten(head.parameters())}
    embedding = np.array(target.model.embed_tokens.weight, np.float64)
    e, h = embedding[tokens], np.array(hidden, np.float64)
    if kind == "mimo":
        parts = rms_norm(h, w["hidden_layernorm.weight"]), rms_norm(e, w["token_layernorm.weight"])
        x = layer_by_hand(np.hstack(parts) @ w["input_proj.weight"].T, w, "")
        expected = rms_norm(x, w["final_layernorm.weight"])
        matrix = np.array(target.lm_head.weight, np.float64)
    else:
        parts = rms_norm(e, w["embedding_norm.weight"]), rms_norm(h, w["hidden_norm.weight"])
        x = np.hstack(parts) @ w["projection.weight"].T
        for i in range(2):
            x = layer_by_hand(x, w, f"layers.{i}.")
        expected = rms_norm(x, w["norm.weight"])
        matrix = embedding[[5, 2]]
        other = np.array(head.logits(outputs, mx.array([6])))
        np.testing.assert_allclose(other, expected @ embedding[[6]].T, atol=2e-3)
    np.testing.assert_allclose(np.array(outputs), expected, atol=2e-4)
    np.testing.assert_allclose(np.array(head.logits(outputs)), expected @ matrix.T, atol=2e-3)


def test_a_head_from_a_file(tmp_path):
    target = tiny_llama(8)
    saved = save_head(tmp_path / "head.safetensors", target, [4, 2, 6])
    head = DraftHead.load(tmp_path / "head.safetensors", target)
    assert head.layers[0].self_attn.rope.traditional
    for name, value in tree_flatten(head.parameters()):
        assert value.dtype == mx.float32
        wanted = dict(tree_flatten(saved.parameters()))[name].astype(mx.float16)
        assert mx.array_equal(value, wanted.astype(mx.float32))
    assert head.draft_vocab.tolist() == [4, 2, 6]
    rows = target.model.embed_tokens.weight[mx.array([4, 2, 6])]
    assert mx.array_equal(head.logits(mx.eye(32)), rows.T)
    # The target's matrices are no parameters of the head.
    assert "embedding" not in " ".join(k for k, _ in tree_flatten(head.parameters())).replace(
        "embedding_norm", ""
    )


@pytest.mark.parametrize("kind", ["draft head", "mimo"])
def test_what_is_done_to_a_head_leaves_its_target_alone(kind, tmp_path):
    if kind == "mimo":
        target, weights = tiny_mimo()
        mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
        target.train()
        head = MiMoHead.load(tmp_path, target)
    else:
        target = tiny_llama(8)
        save_head(tmp_path / "head.safetensors", target, [4, 2, 6])
        target.train()
        head = DraftHead.load(tmp_path / "head.safetensors", target)
    assert not head.training and all(module.training for module in target.modules())
    hidden = mx.random.normal((3, 32), key=mx.random.key(0))
    outputs = head(mx.array([1, 2, 3]), hidden, head.make_cache())
    logits = head.logits(outputs, mx.array([5]))
    parameters = dict(tree_flatten(target.parameters()))
    head.freeze()
    nn.quantize(head, group_size=32)
    assert dict(tree_flatten(target.trainable_parameters())).keys() == parameters.keys()
    # The target's matrices, which the head still has, are not quantized.
    assert mx.array_equal(head.logits(outputs, mx.array([5])), logits)
    assert not mx.array_equal(head(mx.array([1, 2, 3]), hidden, head.make_cache()), outputs)


def test_a_head_and_a_target_that_do_not_fit(tmp_path):
    path, target = tmp_path / "head.safetensors", tiny_llama(8)
    save_head(path, target, [4, 2, 6])
    message = r"\[DraftHead.load\] model: expected a llama, .*\[8, 32\] is .*, got \S+Model with "
    with pytest.raises(ValueError, match=message + r"\[16, 32\]"):
        DraftHead.load(path, tiny_llama(16))
    with pytest.raises(ValueError, match=message + "an output matrix"):
        DraftHead.load(path, tiny_mimo()[0])
    with pytest.raises(ValueError, match=message + "None"):
        DraftHead.load(path, counting_model())
    with pytest.raises(FileNotFoundError, match=r"\[DraftHead.load\] path: expected a file"):
        DraftHead.load(tmp_path / "none.safetensors", target)

    weights, metadata = mx.load(str(path), return_metadata=True)
    config = json.loads(metadata["config"])
    short = {k: v for k, v in config.items() if "rope" not in k}
    for changed, message in (
        ((weights, {"config": metadata["config"]}), "a head, got .*no 'target'"),
        ((weights, {"target": "x"}), "no 'config'"),
        ((weights, {**metadata, "config": "x"}), "Expecting value"),
        ((weights, {**metadata, "config": "[1]"}), "an object, got"),
        ((weights, {**metadata, "config": json.dumps(short)}), "rope_theta in its .*, got None"),
        ((weights, {**metadata, "config": json.dumps({**config, "num_layers": 0})}), "int, got 0"),
        (({"x": mx.zeros(1)}, metadata), "a head, got .*no 'draft_vocab'"),
        (
            ({**weights, "draft_vocab": mx.array([8])}, metadata),
            r"int32 ids \[Vd\] in \[0, 8\), got ids from 8 to 8",
        ),
        (({**weights, "draft_vocab": mx.array([1.0])}, metadata), r"got float32 \[1\]"),
    ):
        mx.save_safetensors(str(path), *changed)
        with pytest.raises(ValueError, match=r"\[DraftHead.load\] path: expected .*" + message):
            DraftHead.load(path, target)
    save_head(path, target, [4, 2, 6], num_layers=2)
    with pytest.raises(ValueError, match=r"\[DraftHead.load\] path: expected a head, .*Missing"):
        DraftHead.load(path, target)
    for damaged in (path.read_bytes()[:100], b"", b"no head"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"\[DraftHead.load\] path: expected a head, got"):
            DraftHead.load(path, target)


def test_ids_that_a_head_has_not():
    """A target of more ids than the head's: none indexes past the head's matrix."""
    head = tiny_head(tiny_llama(8), [4, 2, 6])
    last, unknown = mx.array([7, 7]), mx.array([8, 49_999])
    hidden = mx.random.normal((2, 32), key=mx.random.key(0))
    outputs = head(last, hidden, head.make_cache())
    assert mx.array_equal(head(unknown, hidden, head.make_cache()), outputs)
    assert mx.array_equal(head.logits(outputs, unknown), head.logits(outputs, last))


@pytest.mark.parametrize("ids", [[0, -7, 1], [[0, 1]], [0.0, 1.0], [2**24]], ids=str)
def test_a_draft_vocabulary_out_of_range(ids):
    head = TableHead(hidden_counting_model())
    head.draft_vocab = mx.array(ids)
    with pytest.raises(ValueError, match=r"\[MTPDrafter\] head: expected a draft_vocab of int32"):
        MTPDrafter(head)


@pytest.mark.parametrize("part", ["outputs", "logits"])
@pytest.mark.parametrize("ids", [None, [0, 5, 1]])
def test_what_a_head_returns_is_checked(part, ids):
    """A column less would hand over the probabilities of other ids."""
    target = hidden_counting_model()

    class Narrow(TableHead):
        def __call__(self, *arguments):
            outputs = super().__call__(*arguments)
            return outputs[:, :-1] if part == "outputs" else outputs

        def logits(self, outputs, ids=None):
            rows = super().logits(outputs, ids)
            return rows[None] if self.draft_vocab is None else rows[:, :-1]

    drafter = MTPDrafter(Narrow(target, ids and mx.array(ids)), 3)
    with pytest.raises(ValueError, match=rf"\[MTPDrafter\] head: expected {part} of shape"):
        run(target, drafter=drafter)


def test_a_target_of_another_size_is_refused_before_it_reads_the_prompt():
    target = tiny_llama(16)
    cache = make_prompt_cache(target)
    with pytest.raises(ValueError, match=r"\[MTPDrafter\] head: .* size 32, got TableHead for"):
        drafter = MTPDrafter(TableHead(hidden_counting_model(8)))
        run(target, [5], drafter=drafter, prompt_cache=cache)
    assert cache[0].offset == 0


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("name", ["plain", "lookup", "head"])
def test_another_thread_for_every_token(name, rule):
    target = tiny_llama(16)
    head = tiny_head(target)
    drafter = {
        "plain": lambda: None,
        "lookup": lambda: PromptLookup(3, min_ngram=1),
        "head": lambda: MTPDrafter(head, 3),
    }[name]
    options = {"rule": rule, "seed": 4, "max_tokens": 16, "stop_tokens": ()}
    stream = stream_generate(target, TOKENIZER, PROMPT, drafter=drafter(), **options)
    tokens = []
    for _ in range(16):
        with ThreadPoolExecutor(1) as pool:
            tokens.append(pool.submit(next, stream).result().token)
    stream.close()
    assert tokens == run(target, drafter=drafter(), **options).tokens


def test_a_head_that_is_a_module_with_its_arrays_as_attributes():
    target = hidden_counting_model()

    class Module(TableHead, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            TableHead.__init__(self, target, list(range(16)))

    assert "draft_vocab" in Module().parameters()
    result = run(target, [1, 2], drafter=MTPDrafter(Module(), 3), max_tokens=8)
    assert result.tokens == list(range(3, 11)) and result.statistics.cycles == 2


def test_a_hybrid_of_a_drafter_with_itself():
    drafter = MTPDrafter(TableHead(hidden_counting_model()))
    for first, second in ((drafter, drafter), (Adaptive(drafter), drafter)):
        with pytest.raises(ValueError, match=r"\[Hybrid\] second: expected .* no part of first"):
            Hybrid(first, second)


def test_a_hybrid_whose_second_drafter_cannot_begin():
    """The first one's model has not seen the prompt, either."""
    target, model = tiny_llama(16), tiny_llama(16)
    caches = make_prompt_cache(target), make_prompt_cache(model)
    first = DraftModel(model, TOKENIZER, 2, prompt_cache=caches[1])
    with pytest.raises(ValueError, match="PromptLookup.*rule"):
        run(
            target,
            drafter=Hybrid(Adaptive(first), PromptLookup()),
            prompt_cache=caches[0],
            rule=Cascade(),
        )
    assert [cache[0].offset for cache in caches] == [0, 0]


def test_a_head_of_mimo_from_its_checkpoint(tmp_path):
    model, weights = tiny_mimo()
    names = sorted(weights)
    for i, part in enumerate((names[:9], names[9:])):
        mx.save_safetensors(str(tmp_path / f"model-{i}.safetensors"), {k: weights[k] for k in part})
    assert not any("mtp" in name for name in model.sanitize(weights))  # mlx-lm drops them
    head = MiMoHead.load(tmp_path, model)
    for name, value in tree_flatten(head.parameters()):
        assert mx.array_equal(value, weights[f"model.mtp_layers.0.{name}"])
    # Hidden state in, one draft row out per step.
    recorded = Recorded(head, 3)
    statistics = run(model, drafter=recorded, max_tokens=30, seed=1).statistics
    assert 0 < statistics.accepted < statistics.drafted
    for text, draft in recorded.drafts:
        expected = rows_from_scratch(model, head, text, draft.draft_tokens.tolist())
        np.testing.assert_allclose(np.array(draft.draft_logits), expected, atol=1e-3)
    with pytest.raises(ValueError, match=r"\[MiMoHead.load\] model: expected a MiMo, got .*llama"):
        MiMoHead.load(tmp_path, tiny_llama(8))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"folder: expected .* model.mtp_layers.0.\*, got"):
        MiMoHead.load(tmp_path / "empty", model)


# Errors


def test_bad_arguments():
    target = hidden_counting_model()
    head = TableHead(target)
    for count in (0, 255):
        with pytest.raises(ValueError, match=r"\[MTPDrafter\] num_draft_tokens: expected 1 to 254"):
            MTPDrafter(head, count)
    with pytest.raises(
        TypeError, match=r"\[MTPDrafter\] head: expected .*Head asks for, got Model"
    ):
        MTPDrafter(tiny_llama())
    with pytest.raises(TypeError, match=r"\[MTPDrafter\] sampling: expected exactspec.Sampling"):
        MTPDrafter(head, sampling=0.5)
    for arguments, name in (((4, MTPDrafter(head)), "first"), ((PromptLookup(), head), "second")):
        with pytest.raises(TypeError, match=rf"\[Hybrid\] {name}: expected .*Drafter, got"):
            Hybrid(*arguments)
    other = MTPDrafter(TableHead(hidden_counting_model(8)))
    with pytest.raises(
        ValueError, match=r"\[MTPDrafter\] head: .* of size 32, got TableHead for 16"
    ):
        run(target, [1, 2], drafter=other)
    message = r"\[stream_generate\] model: expected .* hidden states, got toy_models.TableModel"
    with pytest.raises(ValueError, match=message):
        run(TableModel(target.table), [1, 2], drafter=MTPDrafter(head))
    with pytest.raises(ValueError, match=r"\[PromptLookup\] rule: expected one that does not read"):
        run(target, drafter=Hybrid(PromptLookup(), MTPDrafter(head)), rule=Cascade())
    assert run(target, [1, 2], drafter=MTPDrafter(head), rule=Cascade(), max_tokens=5).tokens == [
        *range(3, 8)
    ]


@pytest.mark.parametrize("draft_vocab", [None, list(range(16))])
@pytest.mark.parametrize(("num_draft_tokens", "slot"), [(3, 0), (2, 1)])
def test_nan_of_the_head(num_draft_tokens, slot, draft_vocab):
    target = hidden_counting_model()
    head = TableHead(target, draft_vocab)
    logits = head.logits
    # After token 5, at whichever position.
    bad = mx.array([i % 16 == 5 for i in range(32)])
    head.logits = lambda outputs, ids=None: mx.where(
        (outputs @ bad.astype(mx.float32))[:, None] > 0, mx.nan, logits(outputs, ids)
    )
    drafter = MTPDrafter(head, num_draft_tokens)
    # Cycles of three drafts come to 5 as a text's last token, of two as a draft.
    with pytest.raises(NonFiniteLogitsError, match=rf"draft .* slot {slot}") as caught:
        run(target, [0, 1], drafter=drafter)
    assert caught.value.partial.tokens == [2, 3, 4, 5]
    # At temperature 0 the target decides alone.
    result = run(target, [0, 1], drafter=drafter, sampling=GREEDY, max_tokens=10)
    assert result.tokens == list(range(2, 12))


# The default model


@pytest.fixture(scope="module")
def default_model():
    model, tokenizer = load_default_model()
    return model, tokenizer, load_default_head(model)


@pytest.mark.prove
@pytest.mark.parametrize("prompt", ["Name three rivers in Europe.", "Write a haiku about rain."])
def test_text_of_the_default_model(default_model, prompt, figure):
    model, tokenizer, head = default_model
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    for temperature, rule in ((0, "token"), (0.7, "coupled")):
        options = {
            "sampling": Sampling(temperature),
            "rule": rule,
            "seed": 3,
            "max_tokens": 40,
            "stop_tokens": (),
        }
        plain = generate(model, tokenizer, ids, **options)
        for drafter in (
            *(MTPDrafter(head, count) for count in (1, 2, 4)),
            Hybrid(PromptLookup(4, min_ngram=3), Adaptive(MTPDrafter(head, 4))),
        ):
            result = generate(model, tokenizer, ids, drafter=drafter, **options)
            gap = first_difference_gap(
                *(model, ids, plain.tokens, result.tokens),
                temperature=temperature or 1.0,
                coupled_seed=3 if rule == "coupled" else None,
            )
            if gap is not None:
                figure("gap of the two best scores at the first difference", gap)
                assert gap < NEAR_TIE
            if isinstance(drafter, MTPDrafter):
                rate = result.statistics.slot_acceptance_rates[0]
                figure(f"acceptance of the first of {drafter.num_draft_tokens}, {rule}", rate)
                assert rate > 0.05  # of a head attached wrongly it is about 0

"""Acceptance rules and trees of drafts in the decode loop."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from exactspec import Cascade, Sampling, Typical
from exactspec.cached_model import CachedModel
from exactspec.drafters import Draft, Drafter, DraftModel, DraftTree, PromptLookup
from exactspec.generate import generate, stream_generate
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from toy_models import NEAR_TIE, TableModel, first_difference_gap, tiny_llama, toy_tokenizer

PROMPT = [3, 7, 1, 4, 3, 7, 1]
TOKENIZER = toy_tokenizer()


def run(model, prompt=PROMPT, **options):
    return generate(model, TOKENIZER, prompt, stop_tokens=(), **options)


# Coupled noise: the text is a function of target and key


def coupled_drafters(similar, other):
    yield None
    for count in (1, 2, 5, 9):
        yield PromptLookup(count, min_ngram=1)
    for model in (similar, other):
        for count in (1, 3, 6):
            yield DraftModel(model, TOKENIZER, count)
    yield DraftModel(similar, TOKENIZER, 4, sampling=Sampling(temperature=0))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0.6, top_k=5), Sampling(2.0, top_p=0.9, min_p=0.05)],
    ids=["plain", "top-k", "filters"],
)
def test_coupled_text_does_not_depend_on_the_drafter(sampling, figure):
    # A model of fixed logits: no forward is wide enough to round differently.
    table = mx.random.normal((2, 16, 16), key=mx.random.key(3)) * 2
    target, similar = TableModel(table), TableModel(table + 0.3 * mx.random.normal(table.shape))
    for seed in range(3):
        texts = []
        for drafter in coupled_drafters(similar, TableModel(-table)):
            result = run(target, max_tokens=50, sampling=sampling, rule="coupled", seed=seed,
                         drafter=drafter)  # fmt: skip
            texts.append(result.tokens)
            assert result.statistics.exact
        assert len({tuple(text) for text in texts}) == 1
    assert run(target, max_tokens=50, sampling=sampling, rule="coupled", seed=9).tokens != texts[0]


def test_coupled_text_does_not_depend_on_how_the_prompt_is_read():
    target = TableModel(mx.random.normal((2, 16, 16), key=mx.random.key(3)))
    options = {"rule": "coupled", "seed": 1}
    whole = run(target, max_tokens=20, **options)
    cache = make_prompt_cache(target)
    first = run(target, max_tokens=8, prompt_cache=cache, **options)
    rest = run(target, [0], max_tokens=12, prompt_cache=cache, **options)
    assert first.tokens == whole.tokens[:8]
    again = run(target, [*PROMPT, *first.tokens, 0], max_tokens=12, **options)
    assert rest.tokens == again.tokens


def test_coupled_drafts_of_a_similar_model_are_mostly_accepted(figure):
    target, drafter = tiny_llama(), DraftModel(tiny_llama(noise=0.02), TOKENIZER, 4)
    rates = {}
    for rule in ("token", "coupled"):
        result = run(target, max_tokens=400, rule=rule, seed=0, drafter=drafter)
        rates[rule] = result.statistics.mean_accepted_length
        figure(f"mean accepted length, {rule}", rates[rule])
    assert rates["coupled"] > 0.6 * rates["token"]


def test_coupled_text_of_a_real_architecture(figure):
    target = tiny_llama()
    plain = run(target, max_tokens=60, rule="coupled", seed=4)
    assert len(set(plain.tokens)) > 10
    for drafter in coupled_drafters(tiny_llama(noise=0.02), tiny_llama(seed=9)):
        other = run(target, max_tokens=60, rule="coupled", seed=4, drafter=drafter)
        gap = first_difference_gap(target, PROMPT, plain.tokens, other.tokens, coupled_seed=4)
        if gap is not None:
            figure("gap of the two best scores at the first difference", gap)
            assert gap < NEAR_TIE


# Lossy rules


@pytest.mark.parametrize("rule", [Typical(), Cascade(0.2)], ids=["typical", "cascade"])
def test_lossy_rules_accept_more_and_say_so(rule):
    target, drafter = tiny_llama(), DraftModel(tiny_llama(noise=0.05), TOKENIZER, 4)
    exact = run(target, max_tokens=300, seed=0, drafter=drafter)
    lossy = run(target, max_tokens=300, seed=0, drafter=drafter, rule=rule)
    assert exact.statistics.exact and not lossy.statistics.exact
    assert lossy.statistics.acceptance_rate > exact.statistics.acceptance_rate
    greedy = {"max_tokens": 40, "sampling": Sampling(temperature=0)}
    lossy = run(target, drafter=drafter, rule=rule, **greedy)
    assert lossy.tokens == run(target, **greedy).tokens and lossy.statistics.exact
    assert run(target, rule=rule, max_tokens=5).statistics.exact  # no draft was judged


@pytest.mark.parametrize(
    ("drafter", "rule", "message"),
    [
        (PromptLookup(), Cascade(), r"\[PromptLookup\] rule: expected .*does not read"),
        (PromptLookup(num_branches=2), "block", r"\[PromptLookup\] rule: .*'token' for a tree"),
        (PromptLookup(num_branches=2), "coupled", r"\[PromptLookup\] rule: expected 'token'"),
        (DraftTree(tiny_llama(), TOKENIZER), Typical(), r"\[DraftTree\] rule: expected 'token'"),
        (None, "typical", r"\[stream_generate\] rule: expected one of 'token', 'block', 'coupled'"),
        (None, Typical(epsilon=2), r"\[stream_generate\] rule.epsilon: expected .* in \[0, 1\]"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit(drafter, rule, message):
    with pytest.raises(ValueError, match=message):
        run(tiny_llama(), drafter=drafter, rule=rule, max_tokens=5)


def test_cascade_fits_every_chain_at_temperature_0():
    """There the drafts' distribution is not read."""
    greedy = {"max_tokens": 30, "sampling": Sampling(temperature=0)}
    lookup = run(tiny_llama(), drafter=PromptLookup(), rule=Cascade(), **greedy)
    assert lookup.tokens == run(tiny_llama(), **greedy).tokens
    assert lookup.statistics.drafted > 0


# Trees


def tree_paths(parents):
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        yield path


@pytest.mark.parametrize("cached", [0, 4, len(PROMPT) - 1])
@pytest.mark.parametrize("pieces", [[7], [2, 3, 2], [1] * 7])
def test_nodes_see_the_text_and_their_ancestors(pieces, cached):
    """Whatever part of the text is cached, and however the tree is fed."""
    target = tiny_llama()
    model = CachedModel(target)
    model.settle(PROMPT[: cached + 1], 0)
    model.prefill()
    model.settle(PROMPT[cached + 1 :], 0)
    tokens, parents = [10, 11, 12, 13, 14, 15, 16], [-1, -1, 0, 2, 1, 2, 4]
    rows, start = [], 0
    for size in pieces:
        end = start + size
        rows.append(model.feed_tree(mx.array(tokens[start:end]), parents[start:end]))
        start = end
    rows = mx.concatenate(rows)[-len(tokens) :]
    for row, path in zip(rows, tree_paths(parents)):
        alone = target(mx.array([PROMPT + [tokens[i] for i in path]]))[0, -1]
        np.testing.assert_allclose(np.array(row), np.array(alone), atol=1e-4)


@pytest.mark.parametrize(
    "path, num_accepted",
    [
        (path, num_accepted)
        for path in ([], [0], [1, 4], [0, 2, 5], [0, 2, 3])
        for num_accepted in range(len(path) + 1)
    ],
)
def test_only_the_accepted_path_stays_in_the_cache(path, num_accepted):
    target = tiny_llama()
    model, plain = CachedModel(target), CachedModel(target)
    tokens = [10, 11, 12, 13, 14, 15, 16]
    model.settle(PROMPT, 0)
    model.feed_tree(mx.array(tokens), [-1, -1, 0, 2, 1, 2, 4])
    text = [*(tokens[i] for i in path[:num_accepted]), 20]
    model.settle(text, num_accepted, path)
    assert model.cache[0].offset == len(PROMPT) + num_accepted
    plain.settle(PROMPT + text, 0)
    none = mx.zeros((0,), mx.int32)
    np.testing.assert_allclose(
        np.array(model.feed(none)[-1]), np.array(plain.feed(none)[-1]), atol=1e-4
    )


WIDTHS = [(1,), (4,), (2, 2), (3, 2, 1), (1, 3, 1, 2)]
TREES = [
    PromptLookup(4, num_branches=3, min_ngram=1),
    *(DraftTree(tiny_llama(noise=0.03), TOKENIZER, widths) for widths in WIDTHS),
]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 60])
@pytest.mark.parametrize("drafter", TREES, ids=lambda d: str(getattr(d, "widths", "lookup")))
def test_greedy_text_of_a_tree_is_that_of_plain_decoding(drafter, max_tokens):
    target, greedy = tiny_llama(), {"sampling": Sampling(temperature=0), "max_tokens": max_tokens}
    cache, plain_cache = make_prompt_cache(target), make_prompt_cache(target)
    plain = run(target, prompt_cache=plain_cache, **greedy)
    tree = run(target, prompt_cache=cache, drafter=drafter, **greedy)
    gap = first_difference_gap(target, PROMPT, plain.tokens, tree.tokens)
    assert gap is None or gap < NEAR_TIE
    assert cache[0].offset == plain_cache[0].offset == len(PROMPT) + max_tokens
    if gap is None:
        for a, b in zip(cache, plain_cache):
            for x, y in zip(a.state[:2], b.state[:2]):
                x, y = x[..., : a.offset, :], y[..., : a.offset, :]
                np.testing.assert_allclose(np.array(x), np.array(y), atol=1e-4)


def test_a_tree_is_accepted_at_least_as_often_as_its_first_branch(figure):
    target, draft = tiny_llama(), tiny_llama(noise=0.05)
    lengths = {}
    for widths in [(1, 1, 1), (3, 2, 1)]:
        drafter = DraftTree(draft, TOKENIZER, widths)
        result = run(target, max_tokens=600, seed=0, drafter=drafter)
        lengths[widths] = result.statistics.mean_accepted_length
        figure(f"mean accepted length of {widths}", lengths[widths])
        assert len(result.statistics.slot_drafted) == 3
    assert lengths[3, 2, 1] > 1.1 * lengths[1, 1, 1]


def test_sources_of_a_tree():
    target = tiny_llama()
    result = run(target, max_tokens=200, seed=0, drafter=DraftTree(target, TOKENIZER, (2, 2)))
    sources = "".join(source[0] for source in result.sources)
    cycles = sources.replace("r", "r ").replace("b", "b ").split()
    # Two accepted drafts end at a leaf; after fewer all children were rejected. (The last trees are
    # cut by the token limit.)
    assert set(cycles[:-2]) == {"ddb", "dr", "r"}


def test_prompt_lookup_proposes_several_continuations():
    drafter = PromptLookup(3, num_branches=3, max_ngram=2, min_ngram=1)
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 2, 9, 9, 1, 2]
    drafter.begin(text, tokenizer=None, sampling=None, max_tokens=9, rule="token", position=0)
    draft = drafter.draft(254, mx.random.key(0))
    # After (1, 2): 3 6 2 and 3 4 5; after (2,): 9 9 1.
    assert draft.draft_tokens.tolist() == [3, 6, 2, 4, 5, 9, 9, 1]
    assert list(draft.parents) == [-1, 0, 1, 0, 3, -1, 5, 6]
    short = drafter.draft(1, mx.random.key(0))
    assert short.draft_tokens.tolist() == [3, 9] and list(short.parents) == [-1, -1]


def test_a_tree_needs_a_cache_that_holds_one():
    target = tiny_llama()
    drafter = PromptLookup(num_branches=2, min_ngram=1)
    cache = [RotatingKVCache(max_size=1000), *(KVCache() for _ in target.layers[1:])]
    message = r"\[stream_generate\] prompt_cache: expected KVCache .* got RotatingKVCache"
    with pytest.raises(ValueError, match=message):
        run(target, prompt_cache=cache, max_tokens=30, drafter=drafter)


def test_a_tree_that_is_too_deep():
    class Deep(Drafter):
        proposes_trees = True

        def draft(self, limit, key):
            return Draft(mx.array([1, 2, 3]), parents=[-1, 0, 1])

    with pytest.raises(ValueError, match=r"expected at most 1 draft tokens in a row .* got 3"):
        run(tiny_llama(), max_tokens=2, drafter=Deep())


class Proposer(Drafter):
    """Returns what it is given."""

    proposes_trees = True

    def __init__(self, proposal):
        self.proposal = proposal

    def draft(self, limit, key):
        return self.proposal


@pytest.mark.parametrize(
    ("proposal", "error", "message"),
    [
        (None, TypeError, "expected a Draft of Proposer, got NoneType"),
        (Draft([1, 2]), TypeError, r"expected draft_tokens that are an array \[K\] .* got list"),
        (Draft(mx.array([[1]])), TypeError, r"got \[1, 1\]"),
        (Draft(mx.array([1, 2]), parents=[-1]), ValueError, "2 parents of Proposer, got 1"),
        (Draft(mx.array([1, 2]), parents=[-1, 1]), ValueError, "parent of node 1 .* got 1"),
        (Draft(mx.array([1, 2]), parents=[-1, -2]), ValueError, "parent of node 1 .* got -2"),
        (Draft(mx.array([1]), parents=mx.array([-1])), TypeError, "sequence of integers"),
        (Draft(mx.ones((300,)), parents=[-1] * 300), ValueError, "at most 254 .* got 300"),
    ],
)  # fmt: skip
def test_what_a_drafter_must_not_return(proposal, error, message):
    with pytest.raises(error, match=r"\[stream_generate\] drafter: .*" + message):
        run(tiny_llama(), max_tokens=8, drafter=Proposer(proposal))


def test_a_tree_of_nothing():
    target = tiny_llama()
    plain = run(target, max_tokens=8, sampling=Sampling(0))
    none = mx.zeros((0,), mx.int32)
    for proposal in (Draft(none, parents=[]), Draft(mx.array([-1, -1]), parents=[-1, -1])):
        tree = run(target, max_tokens=8, sampling=Sampling(0), drafter=Proposer(proposal))
        assert tree.tokens == plain.tokens and set(tree.sources) == {"bonus"}
        assert tree.statistics.drafted == 0


class FailingLayer:
    """A layer that fails after some calls, when the layers before it have grown their caches."""

    def __init__(self, layer, calls):
        self.layer, self.calls = layer, calls
        self.use_sliding = layer.use_sliding

    def __call__(self, *args, **options):
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        return self.layer(*args, **options)


@pytest.mark.parametrize("calls", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
def test_a_forward_that_fails_half_way_leaves_the_text_in_the_cache(kind, calls):
    target = tiny_llama()
    cache = make_prompt_cache(target)
    lookup = {"chain": PromptLookup(min_ngram=1), "tree": PromptLookup(num_branches=3, min_ngram=1)}
    yielded = []
    stream = stream_generate(
        *(target, TOKENIZER, PROMPT),
        drafter=lookup.get(kind),
        stop_tokens=(),
        max_tokens=30,
        prompt_cache=cache,
    )
    yielded.append(next(stream).token)
    target.layers[1] = FailingLayer(target.layers[1], calls)
    with pytest.raises(KeyboardInterrupt):
        for item in stream:
            yielded.append(item.token)
    # What was pending could not be fed by the broken model.
    assert len({layer.offset for layer in cache}) == 1
    text = PROMPT + yielded
    assert len(text) - 5 <= cache[0].offset <= len(text)


@pytest.mark.parametrize(
    ("widths", "error", "message"),
    [
        ((), ValueError, "expected a tree of 1 to 254 tokens, got 0"),
        ((300,), ValueError, "expected a tree of 1 to 254 tokens, got 300"),
        ((16, 16), ValueError, "got 272"),
        ((0,), ValueError, "expected at least 1, got 0"),
        ((2.0,), TypeError, "expected an integer, got float"),
    ],
)
def test_widths(widths, error, message):
    with pytest.raises(error, match=rf"\[DraftTree\] widths: .*{message}"):
        DraftTree(tiny_llama(), TOKENIZER, widths)

"""``verify_tree``: its law by enumeration, replayed against the oracle, by sampling, and cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import oracle
import oracle_tree
import pytest
from backends import BACKENDS, COMPILED_SOON
from exactspec import Sampling
from hypothesis import given as hypothesis_given
from hypothesis import settings
from oracle_tree import CONTEXT, Tree
from strategies import tree_problems
from test_exactness import chi_square
from tolerances import CHI_SQUARE_P, LOGPROB, TIE, TIE_SHARE, TREE_TIE_SHARE

# The law: every tree, every draft, every coin


V = 3
DRAFTS = ("with replacement", "without replacement", "one-hot")
GAP = -2  # stands for a token that no draft can produce


def all_shapes(num_nodes: int) -> list[tuple[int, ...]]:
    """The parents of every tree of so many nodes."""
    return list(itertools.product(*(range(CONTEXT, node) for node in range(num_nodes))))


@cache
def context_logits(seed: int, context: tuple[int, ...], size: int = V) -> np.ndarray:
    return np.random.default_rng([seed, *context]).normal(size=size).astype(np.float32) * 1.5


@cache
def draft_logits_of(context: tuple[int, ...]) -> np.ndarray:
    """One id in three contexts is impossible, so that a draft may run out of ids."""
    logits = context_logits(60, context).copy()
    if sum(context) % 3 == 0:
        logits[np.argmin(logits)] = -np.inf
    return logits


@cache
def target_of(context: tuple[int, ...]) -> np.ndarray:
    return oracle.distribution(context_logits(10, context), oracle.DEFAULT).probs


@cache
def draft_of(context: tuple[int, ...]) -> np.ndarray:
    return oracle.distribution(draft_logits_of(context), oracle.DEFAULT).probs


class Grown(NamedTuple):
    """A tree whose tokens were drawn, how likely that was, and the context behind each node."""

    tokens: tuple[int, ...]
    prob: float
    contexts: tuple[tuple[int, ...], ...]  # N + 1


def grow(parents: tuple[int, ...], kind: str, gaps: tuple[int, ...] = ()) -> list[Grown]:
    """Every tree of these parents; the tokens of one-hot nodes are a function of their context.

    ``gaps``: nodes that hold a token which no draft can produce.
    """
    trees = [Grown((), 1.0, ((),))]
    for node, parent in enumerate(parents):
        longer = []
        for tree in trees:
            context = tree.contexts[parent + 1]
            siblings = [tree.tokens[i] for i in range(node) if parents[i] == parent]
            if node in gaps or min(context, default=0) < 0:
                choices = [(GAP, 1.0)]
            elif kind == "one-hot":
                choices = [((sum(context) + 2 * node) % V, 1.0)]
            else:
                probs = draft_of(context).copy()
                if kind == "without replacement":
                    probs[[token for token in siblings if token >= 0]] = 0
                    # Where the draft has run out, anything may stand there.
                    probs = probs / probs.sum() if probs.any() else np.eye(V)[0]
                choices = [(token, probs[token]) for token in np.flatnonzero(probs)]
            for token, prob in choices:
                contexts = (*tree.contexts, (*context, int(token)))
                longer.append(Grown((*tree.tokens, int(token)), tree.prob * prob, contexts))
        trees = longer
    return trees


def stacked(rows, contexts) -> np.ndarray:
    return np.stack([rows(tuple(abs(token) for token in context)) for context in contexts])


def tree_of(grown: Grown, parents: tuple[int, ...], kind: str) -> Tree:
    draft = None if kind == "one-hot" else stacked(draft_logits_of, grown.contexts)
    return Tree(
        stacked(lambda context: context_logits(10, context), grown.contexts),
        list(grown.tokens),
        list(parents),
        draft,
        replacement=kind != "without replacement",
    )


Laws = Callable[[Tree], list[tuple[float, list[int], np.ndarray]]]


def joint_error(
    parents: tuple[int, ...], kind: str, gaps: tuple[int, ...] = (), laws: Laws | None = None
) -> float:
    """The largest error of the joint law of the first N + 1 tokens, continued by the target.

    ``laws(tree)``: probability, path, and weights of the next token, of everything that may happen.
    """
    laws = laws or oracle_tree.emitted_law
    depth = len(parents) + 1
    emitted = {}
    for grown in grow(parents, kind, gaps):
        for prob, path, law in laws(tree_of(grown, parents, kind)):
            context = tuple(grown.tokens[node] for node in path)
            emitted[context] = emitted.get(context, 0.0) + grown.prob * prob * law
    assert sum(law.sum() for law in emitted.values()) == pytest.approx(1, abs=1e-12)
    error = 0.0
    for tokens in itertools.product(range(V), repeat=depth):
        steps = [target_of(tokens[:i])[tokens[i]] for i in range(depth)]
        got = 0.0
        for i in range(depth):
            if tokens[:i] in emitted:
                got += emitted[tokens[:i]][tokens[i]] * np.prod(steps[i + 1 :])
        error = max(error, abs(got - np.prod(steps)))
    return error


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("num_nodes", range(5))
def test_the_law_is_exact(num_nodes, kind):
    """Every tree of up to four nodes, by enumeration of all drafts and all coins."""
    for parents in all_shapes(num_nodes):
        assert joint_error(parents, kind) <= 1e-12, parents


@pytest.mark.parametrize("kind", DRAFTS)
def test_children_that_were_not_drawn_change_no_law(kind):
    """A node that its draft cannot produce is passed over, and its siblings' law is as without."""
    for gap in range(4):
        for parents in ((-1, -1, -1, 0), (-1, -1, 1, 1), (-1, 0, 0, 0)):
            assert joint_error(parents, kind, (gap,)) <= 1e-12


class NaiveCoins(oracle_tree.Coins):
    """The known wrong rule: every sibling is judged by the target as it was before the first."""

    def __call__(self, node, left, draft):
        row = self.given.target(self.given.parents[node])
        return super().__call__(node, left._replace(probs=row.probs), draft)


@pytest.mark.parametrize("kind", DRAFTS)
def test_siblings_must_not_share_the_target(kind):
    """The control: the enumeration sees a target that is not updated between siblings."""

    def naive(tree):
        return oracle_tree.emitted_law(tree, NaiveCoins)

    assert joint_error((-1,), kind, laws=naive) <= 1e-12  # an only child is judged rightly
    assert joint_error((-1, -1), kind, laws=naive) > 0.01


def test_the_draft_must_be_renormalised(monkeypatch):
    """The control: it sees a draft that rejected tokens do not leave."""
    monkeypatch.setattr(oracle_tree, "without", lambda draft, token: (draft, False))
    assert joint_error((-1, -1), "with replacement") <= 1e-12
    assert joint_error((-1, -1), "without replacement") > 0.01


# Stratified: the operations themselves, midpoints of a grid over all uniforms


def frequencies_of(backend, grid: int) -> Laws:
    """What the operation does on every cell of the grid."""

    def laws(tree: Tree):
        N = len(tree.parents)
        axis = ((np.arange(grid) + 0.5) / grid).astype(np.float32)
        coins = np.stack(np.meshgrid(*[axis] * (N + 1), indexing="ij"), axis=-1)
        coins = coins.reshape(-1, N + 1)

        def shared(row) -> mx.array:
            return mx.broadcast_to(mx.array(row), (len(coins), *np.shape(row)))

        options = {} if tree.one_hot() else {"draft_logits": shared(tree.draft_logits)}
        result = backend.verify_tree(
            shared(tree.target_logits),
            shared(np.array(tree.draft_tokens, np.int32)),
            shared(np.array(tree.parents, np.int32)),
            # V is small: the first uniform of the pair has no effect.
            uniforms=mx.array(np.insert(coins, N, 0.5, axis=1)),
            replacement=tree.replacement,
            **options,
        )
        assert not (np.array(result.status) & ~np.uint32(oracle.ZERO_DRAFT_PROB)).any()
        paths, tokens = np.array(result.path), np.array(result.tokens)
        num_accepted = np.array(result.num_accepted)
        emitted = tokens[np.arange(len(tokens)), num_accepted]
        for path in np.unique(paths, axis=0):
            here = (paths == path).all(axis=1)
            counts = np.bincount(emitted[here], minlength=V)
            yield 1 / len(coins), [int(node) for node in path if node >= 0], counts

    return laws


@pytest.mark.quick(parents=[(-1, -1)])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("parents", [(-1,), (-1, -1), (-1, 0)], ids=str)
def test_stratified(backend, figure, parents, kind):
    """A coin costs half a cell of its axis, the draw's interval two ends of half a cell."""
    grid = 8 if backend.simulated else 40
    error = joint_error(parents, kind, laws=frequencies_of(backend, grid))
    bound = (0.5 * len(parents) + 1) / grid
    figure(f"stratified error (bound {bound:.4f})", error)
    assert error <= bound + TIE


# Sampling: chi-square over keyed draws


NUM_DRAWS, CHUNK = 200_000, 10_000
FAMILY = np.array([-1, -1, -1, 0, 0, 1], np.int32)
SAMPLED_BACKENDS = [backend for backend in BACKENDS if not backend.simulated]


def drawn_siblings(rng, probs: np.ndarray, parents: np.ndarray, replacement: bool) -> np.ndarray:
    """Tokens ``[B, N]`` from draft rows ``[B, N+1, V]``; where ids have run out it is id 0."""
    B, N = len(probs), len(parents)
    tokens = np.zeros((B, N), np.int32)
    for node, parent in enumerate(parents):
        left = probs[:, parent + 1].copy()
        if not replacement:
            for sibling in np.flatnonzero(parents[:node] == parent):
                left[np.arange(B), tokens[:, sibling]] = 0
        cumulative = np.cumsum(left, axis=1)
        points = rng.random((B, 1)) * cumulative[:, -1:]
        tokens[:, node] = (cumulative <= points).sum(axis=1) * (cumulative[:, -1] > 0)
    return tokens


@pytest.mark.parametrize("backend", SAMPLED_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_chi_square(backend, figure, replacement):
    """V = 16, six nodes, and a target behind the first token that depends on it."""
    size, N = 16, len(FAMILY)
    rng = np.random.default_rng(16)
    first, even, odd = rng.normal(size=(3, size)).astype(np.float32) * 1.5
    draft = np.stack([-first, *rng.normal(size=(N, size))]).astype(np.float32)
    draft[1:3] = even
    probs = np.exp(draft.astype(np.float64))
    emitted = []
    for start in range(0, NUM_DRAWS, CHUNK):
        batch_probs = np.broadcast_to(probs, (CHUNK, *probs.shape))
        tokens = drawn_siblings(rng, batch_probs, FAMILY, replacement)
        target = np.zeros((CHUNK, N + 1, size), np.float32)
        target[:, 0] = first
        target[:, 1:] = np.where(tokens[..., None] % 2, odd, even)
        result = backend.verify_tree(
            mx.array(target),
            mx.array(tokens),
            mx.broadcast_to(mx.array(FAMILY), (CHUNK, N)),
            draft_logits=mx.broadcast_to(mx.array(draft), (CHUNK, N + 1, size)),
            replacement=replacement,
            keys=mx.random.split(mx.random.key(start), CHUNK),
        )
        assert not np.array(result.status).any()
        emitted.append(np.array(result.tokens)[:, :2])
    emitted = np.concatenate(emitted)

    def check(name: str, tokens: np.ndarray, logits: np.ndarray) -> None:
        law = oracle.distribution(logits, oracle.DEFAULT).probs
        statistic, p, dof = chi_square(tokens, law, 10**6)
        figure(f"chi-square of {name} ({dof} degrees of freedom, {len(tokens)} draws)", statistic)
        assert p > CHI_SQUARE_P

    check("token 0", emitted[:, 0], first)
    has_second = emitted[:, 1] >= 0
    for name, parity, logits in (("even", 0, even), ("odd", 1, odd)):
        here = has_second & (emitted[:, 0] % 2 == parity)
        check(f"token 1 behind an {name} one", emitted[here, 1], logits)


# Replayed noise


def close(result: mx.array, wanted: np.ndarray, tolerance: float, skipped: np.ndarray) -> None:
    """Equal up to ``tolerance``, NaN where NaN is wanted; ``skipped`` entries may be anything."""
    result = np.where(skipped, wanted, np.array(result))
    np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


def row_stats_of(backend, arguments: dict) -> mx.array:
    """``draft_stats [B, N+1, 4]``, as the draft steps would have left them."""
    logits = arguments["draft_logits"]
    sampling = arguments.get("draft_sampling", arguments["sampling"])
    rows = [
        backend.sample(logits[:, i], sampling, uniforms=mx.zeros((logits.shape[0], 2)))
        for i in range(logits.shape[1])
    ]
    return mx.stack([row.row_stats for row in rows], axis=1)


def check_replay(backend, problem) -> tuple[int, int, int]:
    """Everything returned against the oracle; how many sequences, ties, and accepted nodes."""
    before = [np.array(buffer.astype(mx.float32)) for buffer in problem.buffers()]
    arguments = problem.arguments()
    if problem.hand_over:
        arguments["draft_stats"] = row_stats_of(backend, arguments)
    result = backend.verify_tree(**arguments)
    wanted = oracle_tree.verify_tree(**problem.law)

    clear = ~wanted.ties
    for name in ("tokens", "path", "num_accepted", "status"):
        got = np.array(getattr(result, name))
        np.testing.assert_array_equal(got[clear], getattr(wanted, name)[clear], err_msg=name)
    assert result.exact is True
    assert (result.logprobs is None) == (wanted.logprobs is None)
    if wanted.logprobs is not None:
        close(result.logprobs, wanted.logprobs, LOGPROB, wanted.ties[:, None] | wanted.doubtful)
    for buffer, values in zip(problem.buffers(), before):  # inputs are never written to
        np.testing.assert_array_equal(np.array(buffer.astype(mx.float32)), values)
    return len(clear), int(wanted.ties.sum()), int(wanted.num_accepted.sum())


@pytest.mark.quick(examples=[80])
@pytest.mark.parametrize("examples", [80, 1000])
def test_replay(backend, figure, examples):
    """The same uniforms give the oracle's ids, on all kinds of input."""
    seen = []
    if backend.simulated:
        examples = min(examples, 500)

    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @hypothesis_given(tree_problems())
    def replay(problem):
        seen.append(check_replay(backend, problem))

    replay()
    sequences, ties, accepted = np.sum(seen, axis=0)
    figure("share of ties", ties / sequences)
    assert ties <= TREE_TIE_SHARE * sequences
    assert accepted > sequences / 4


MANY_SIBLINGS = np.array([-1, -1, -1, -1, -1, 0, 0, 0, 1, 1, 1, 8, 8])


@pytest.mark.quick(kind=["dense", "sparse"])
@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("kind", ["dense", "padded", "vocab", "sparse", "one-hot"])
def test_replay_many_siblings(backend, figure, kind, replacement):
    """Most siblings are rejected, so that what is left of the target has come a long way."""
    B, N, size = 200, len(MANY_SIBLINGS), 2100
    run = 40 if backend.simulated else B  # sequences given to it; a map is shorter
    rng = np.random.default_rng(5)
    # Nearly all mass is on 20 ids, but there are two blocks of the draw.
    target, draft = 1.5 * rng.normal(size=(2, B, N + 1, size)).astype(np.float32)
    target[..., 20:] -= 14
    draft[..., 20:] -= 16
    law = {"sampling": oracle.Sampling(temperature=np.linspace(0.7, 1.5, B).astype(np.float32))}
    if kind == "padded":
        draft = np.concatenate([draft, draft[..., :3]], axis=2)
    if kind == "vocab":
        draft = draft[..., np.arange(30) % 20]
        law["draft_vocab"] = rng.integers(0, 20, size=30).astype(np.int32)
    if kind in ("dense", "padded", "vocab"):
        law["draft_logits"] = draft
        law["draft_sampling"] = oracle.DEFAULT
    probs = np.exp(draft[..., :30].astype(np.float64))
    if kind == "vocab":
        probs = probs @ (law["draft_vocab"][:, None] == np.arange(20))
    if kind == "sparse":
        probs = probs[..., :20] / probs[..., :20].sum(axis=-1, keepdims=True)
        law["draft_ids"] = np.broadcast_to(np.arange(20, dtype=np.int32), probs.shape).copy()
        law["draft_probs"] = probs.astype(np.float32)
    law["target_logits"] = target
    law["draft_tokens"] = drawn_siblings(rng, probs, MANY_SIBLINGS, replacement)
    law["parents"] = np.broadcast_to(MANY_SIBLINGS.astype(np.int32), (B, N)).copy()
    law["uniforms"] = rng.random((B, N + 2)).astype(np.float32)
    law["uniforms"][:, :N] **= 1.0 if kind == "one-hot" else 0.2
    op = {k: mx.array(v[:run]) for k, v in law.items() if isinstance(v, np.ndarray)}
    for name in ("sampling", "draft_sampling"):
        if name in law:
            values = [mx.array(v[:run]) if isinstance(v, np.ndarray) else v for v in law[name]]
            op[name] = Sampling(*values)
    result = backend.verify_tree(**op, replacement=replacement)
    wanted = oracle_tree.verify_tree(**law, replacement=replacement)
    clear = ~wanted.ties[:run]
    for name in ("tokens", "path", "num_accepted", "status"):
        got = np.array(getattr(result, name))
        np.testing.assert_array_equal(got[clear], getattr(wanted, name)[:run][clear], err_msg=name)
    figure("share of ties", wanted.ties.mean())
    assert wanted.ties.mean() <= TIE_SHARE
    late = np.isin(wanted.path, [3, 4, 7, 10, 12]).any(axis=1).mean()
    figure("share of sequences that accept after two rejections", late)
    assert late > 0.05


# Single facts


def logs(probs) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(np.array(probs)).astype(np.float32))


def verify_one(backend, target, tokens, parents, coins, pair=(0.5, 0.5), **options):
    """A single tree, without the batch axis; target rows as probabilities."""
    uniforms = mx.array([*coins, *pair], mx.float32)
    return backend.verify_tree(
        logs(target),
        mx.array(tokens, mx.int32),
        mx.array(parents, mx.int32),
        uniforms=uniforms,
        **options,
    )


def check_result(result, tokens, path, status) -> None:
    got = [result.tokens.tolist(), result.path.tolist(), result.status.item()]
    assert got == [tokens, path, status]
    assert result.num_accepted.item() == sum(node >= 0 for node in path)


UNIFORM = [0.25, 0.25, 0.25, 0.25]


@pytest.mark.quick(kind=["sparse"], replacement=[False])
@pytest.mark.parametrize("kind", ["dense", "sparse", "one-hot"])
@pytest.mark.parametrize("replacement", [True, False])
def test_a_chain_is_a_draft(backend, kind, replacement):
    """The same bits as ``verify_draft``."""
    B, N, size = 64, 4, 3000
    keys = mx.random.split(mx.random.key(1), 5)
    target = 4 * mx.random.normal((B, N + 1, size), key=keys[0])
    draft = target + 0.5 * mx.random.normal(target.shape, key=keys[1])
    tokens = mx.random.categorical(draft[:, :N], key=keys[2]).astype(mx.int32)
    options = {"logprobs": "filtered", "keys": mx.random.split(keys[3], B)}
    options["sampling"] = Sampling(temperature=0.8, top_k=50)
    rows = {"draft_logits": draft} if kind == "dense" else {}
    if kind == "sparse":
        ids = mx.argsort(-draft, axis=-1)[..., :5].astype(mx.int32)
        rows = {"draft_ids": ids, "draft_probs": mx.full(ids.shape, 0.2)}
    parents = mx.broadcast_to(mx.arange(-1, N - 1, dtype=mx.int32), (B, N))
    got = backend.verify_tree(target, tokens, parents, replacement=replacement, **rows, **options)
    rows = {name: row[:, :N] for name, row in rows.items()}
    wanted = backend.verify_draft(target, tokens, **rows, **options)
    for name in ("tokens", "num_accepted", "status", "logprobs"):
        np.testing.assert_array_equal(
            np.array(getattr(got, name)), np.array(getattr(wanted, name)), err_msg=name
        )
    on_path = np.arange(N) < np.array(got.num_accepted)[:, None]
    assert np.array(got.path).tolist() == np.where(on_path, np.arange(N), -1).tolist()
    assert got.num_accepted.max().item() > 1


def test_siblings_by_hand(backend):
    """Target (1/2, 1/4, 1/8, 1/8), one-hot children 1, 1, 2, 0 with coins at their thresholds."""
    target = [[0.5, 0.25, 0.125, 0.125]] + [UNIFORM] * 4
    tokens, parents = [1, 1, 2, 0], [-1] * 4
    for coins, path, first in (
        ([0.2499, 0.0, 0.0, 0.0], [0, -1, -1, -1], 1),
        # 1 is rejected, and again; then the target is (2/3, 0, 1/6, 1/6), then (4/5, 0, 0, 1/5).
        ([0.2501, 0.0, 0.1666, 0.9], [2, -1, -1, -1], 2),
        ([0.2501, 0.0, 0.1667, 0.7999], [3, -1, -1, -1], 0),
        ([0.2501, 0.0, 0.1667, 0.8001], [-1] * 4, 3),
    ):
        result = verify_one(backend, target, tokens, parents, coins)
        after = 2 if path[0] >= 0 else -1
        check_result(result, [first, after, -1, -1, -1], path, 0)


def test_without_replacement_by_hand(backend):
    """Target (.1, .4, .5), draft (.6, .1, .3): id 0 rejected, the target is (0, .6, .4).

    The draft stays, and then id 2 always passes; or it is (0, 1/4, 3/4), and the coin decides at
    .4 / .75. Rejected as well, it leaves all mass on id 1.
    """
    target, draft = [[0.1, 0.4, 0.5]] + [[1, 0, 0]] * 2, logs([[0.6, 0.1, 0.3]] * 3)
    for replacement, coin, tokens, path in (
        (True, 0.999, [2, 0, -1], [1, -1]),
        (False, 0.5333, [2, 0, -1], [1, -1]),
        (False, 0.5334, [1, -1, -1], [-1, -1]),
    ):
        options = {"draft_logits": draft, "replacement": replacement}
        result = verify_one(backend, target, [0, 2], [-1, -1], [0.5, coin], **options)
        check_result(result, tokens, path, 0)


def test_a_draft_that_runs_out(backend):
    """Without replacement the siblings after the draft's only id are skipped, and set no bit."""
    target, draft = [[0.5, 0.5, 0]] + [[1, 0, 0]] * 3, logs([[1, 0, 0]] * 4)
    tokens, parents, coins = [0, 1, 7], [-1] * 3, [0.6, 0.0, 0.0]
    skipped = verify_one(
        backend, target, tokens, parents, coins, draft_logits=draft, replacement=False
    )
    check_result(skipped, [1, -1, -1, -1], [-1] * 3, 0)
    tried = verify_one(backend, target, tokens, parents, coins, draft_logits=draft)
    check_result(tried, [1, 0, -1, -1], [1, -1, -1], 8)


def test_unused_nodes(backend):
    """They are never tried, nor are their children, and their parents are ignored."""
    target = [UNIFORM] * 5
    result = verify_one(backend, target, [-1, 0, -1, 1], [5, 0, -7, -1], [0.0] * 4)
    check_result(result, [1, 2, -1, -1, -1], [3, -1, -1, -1], 0)


@pytest.mark.parametrize("parent", [1, 2, 9, -2, -(2**31), 2**31 - 1])
def test_bad_parents(backend, parent):
    """The tree ends before the node, although its parent may be off the path."""
    target = [UNIFORM] * 4
    result = verify_one(backend, target, [0, 1, 2], [-1, parent, -1], [0.0] * 3)
    check_result(result, [0, 2, -1, -1], [0, -1, -1], 16)
    result = verify_one(backend, target, [0, 1, 2], [-1, parent, -1], [0.9, 0.0, 0.0])
    check_result(result, [2, -1, -1, -1], [-1, -1, -1], 16)


def test_tokens_that_are_passed_over(backend):
    """Below -1, beyond the vocabulary when one-hot, or not among the draft's columns."""
    target, parents = [[0.25, 0.75, 0]] + [[0, 1, 0]] * 2, [-1, -1]
    draft, pair = mx.zeros((3, 2)), (0.5, 0.1)
    sparse = {"draft_ids": mx.array([[0, 1]] * 3), "draft_probs": mx.full((3, 2), 0.5)}
    for token, options in (
        (-2, {}),
        (-2, {"draft_logits": draft}),
        (3, {}),
        (2, {"draft_logits": draft}),
        (1, {"draft_logits": draft, "draft_vocab": mx.array([0, 2])}),
        (3, sparse),
    ):
        # The sibling is judged by the target as it is, and taken from it if it is rejected.
        accepted, rejected = (
            verify_one(backend, target, [token, 0], parents, [0.0, coin], pair, **options)
            for coin in (0.2, 0.6)
        )
        check_result(accepted, [0, 1, -1], [1, -1], 4)
        check_result(rejected, [1, -1, -1], [-1, -1], 4)
        # Not reached: no bit.
        first = verify_one(backend, target, [0, token], parents, [0.0, 0.0], pair, **options)
        check_result(first, [0, 1, -1], [0, -1], 0)


def test_tokens_beyond_the_vocabulary_that_the_draft_can_produce(backend):
    """An ordinary rejection: the draft (1/2, 1/4 | 1/4) leaves (3/8, 5/8) of (1/2, 1/2)."""
    target = [[0.5, 0.5]] * 2
    draft = logs([[0.5, 0.25, 0.25]] * 2)
    result = verify_one(backend, target, [2], [-1], [0.0], (0.5, 0.0), draft_logits=draft)
    check_result(result, [1, -1], [-1], 4)


def test_greedy(backend):
    """The child that is the argmax, the first by index; neither coins nor drafts are read."""
    target = [[0.1, 0.6, 0.3]] + [[0.7, 0.2, 0.1]] * 5
    tokens, parents = [0, 1, 1, 2, 0], [-1, -1, -1, 1, 1]
    options = {"sampling": Sampling(temperature=0), "draft_logits": mx.full((6, 3), mx.nan)}
    result = verify_one(backend, target, tokens, parents, [0.999] * 5, **options)
    check_result(result, [1, 0, 0, -1, -1, -1], [1, 4, -1, -1, -1], 0)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_rows_off_the_path_are_not_read(backend, kind):
    """Bad rows matter where they are reached: a draft's only if there are children to try."""
    size, path_rows = 4, (0, 2, 4)
    tokens, parents, coins = [0, 1, 2, 3, 2], [-1, -1, 0, 1, -1], [0.9, 0.0, 0.0, 0.0, 0.0]
    draft = np.zeros((6, size), np.float32)
    target = np.full((6, size), np.nan, np.float32)
    target[list(path_rows)] = 0.0
    target[0, 0] = -np.inf

    def verify(target, bad_draft_rows):
        rows = draft.copy()
        rows[list(bad_draft_rows)] = np.nan
        if kind == "dense":
            given = {"draft_logits": mx.array(rows)}
        else:
            ids = mx.broadcast_to(mx.arange(size), rows.shape)
            given = {"draft_ids": ids, "draft_probs": mx.array(0.25 + rows)}
        return backend.verify_tree(
            mx.array(target),
            mx.array(tokens, mx.int32),
            mx.array(parents, mx.int32),
            uniforms=mx.array([*coins, 0.5, 0.5], mx.float32),
            **given,
        )

    check_result(verify(target, (1, 3, 4, 5)), [1, 3, 2, -1, -1, -1], [1, 3, -1, -1, -1], 0)
    check_result(verify(target, (2,)), [1, -1, -1, -1, -1, -1], [1, -1, -1, -1, -1], 2)
    check_result(verify(target, (0,)), [-1] * 6, [-1] * 5, 2)
    for row, accepted in ((0, []), (2, [1]), (4, [1, 3])):
        bad = target.copy()
        bad[row, 1] = np.nan
        emitted = [tokens[node] for node in accepted]
        check_result(
            verify(bad, ()),
            emitted + [-1] * (6 - len(accepted)),
            accepted + [-1] * (5 - len(accepted)),
            1,
        )


def test_nan_draft_stats(backend):
    """In a row with children to try it stops there; in another it is not read."""
    draft, stats = mx.zeros((3, 2)), mx.tile(mx.array([0.0, np.log(2), 0.0, 1.0]), (3, 1))
    options = {"draft_logits": draft, "draft_stats": stats}
    target, tokens, parents, coins = [[0.5, 0.5]] * 3, [0, 1], [-1, 0], [0.5, 0.5]
    stats[2, 0] = mx.nan
    result = verify_one(backend, target, tokens, parents, coins, **options)
    check_result(result, [0, 1, 1], [0, 1], 0)
    stats[1, 0] = mx.nan
    result = verify_one(backend, target, tokens, parents, coins, **options)
    check_result(result, [0, -1, -1], [0, -1], 2)


def test_bad_parameter_in_an_array(backend):
    """It silences its own sequence only."""
    for side in ("sampling", "draft_sampling"):
        result = backend.verify_tree(
            logs([[[0, 1], [1, 0]]] * 3),
            mx.ones((3, 1), mx.int32),
            mx.full((3, 1), -1, mx.int32),
            draft_logits=mx.zeros((3, 2, 2)),
            uniforms=mx.full((3, 3), 0.5),
            logprobs="filtered",
            **{side: Sampling(temperature=mx.array([1.0, np.nan, 1.0]))},
        )
        assert result.status.tolist() == [0, 32, 0]
        assert result.num_accepted.tolist() == [1, 0, 1]
        assert result.path.tolist() == [[0], [-1], [0]]
        assert result.tokens.tolist() == [[1, 0], [-1, -1], [1, 0]]
        assert np.isnan(np.array(result.logprobs)[1]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.0, 1.5, -0.25])
def test_bad_uniform(backend, bad):
    """Wherever it stands, used or not; parameters out of range likewise."""
    arguments = (logs([[[0, 1], [1, 0]]] * 3), mx.ones((3, 1), mx.int32))
    parents, good = mx.full((3, 1), -1, mx.int32), mx.full((3, 3), 0.5)
    faults = [{"uniforms": good, "sampling": Sampling(min_p=mx.array([1.0, 1.5, 0.0]))}]
    for place in range(3):
        uniforms = good + 0
        uniforms[1, place] = bad
        faults += [{"uniforms": uniforms, "sampling": Sampling(t)} for t in (1.0, 0.0)]
    for fault in faults:
        result = backend.verify_tree(*arguments, parents, **fault, logprobs="raw")
        assert result.status.tolist() == [0, 32, 0]
        assert result.path.tolist() == [[0], [-1], [0]]
        assert result.tokens.tolist() == [[1, 0], [-1, -1], [1, 0]]
        assert np.isnan(np.array(result.logprobs)[1]).all()


def test_result_dtypes_and_shapes(backend):
    tokens = mx.zeros((2, 3), mx.uint32)
    result = backend.verify_tree(
        mx.zeros((2, 4, 5), mx.bfloat16), tokens, mx.full((2, 3), -1, mx.int32), logprobs="raw"
    )
    assert result.tokens.shape == (2, 4) and result.tokens.dtype == mx.int32
    assert result.path.shape == (2, 3) and result.path.dtype == mx.int32
    assert result.num_accepted.shape == (2,) and result.num_accepted.dtype == mx.int32
    assert result.status.shape == (2,) and result.status.dtype == mx.uint32
    assert result.logprobs.shape == (2, 4) and result.logprobs.dtype == mx.float32


@pytest.mark.parametrize("B, N", [(0, 2), (0, 0), (3, 0)])
def test_empty(backend, B, N):
    result = backend.verify_tree(
        mx.zeros((B, N + 1, 4)), mx.zeros((B, N), mx.int32), mx.zeros((B, N), mx.int32)
    )
    assert result.tokens.shape == (B, N + 1) and result.path.shape == (B, N)
    assert ((result.tokens >= 0) & (result.tokens < 4)).all()


# Noise, batches and the graph


def inputs(seed: int = 0, B: int = 6, N: int = 5, size: int = 300) -> dict[str, mx.array]:
    """A sampled batch with a dense draft; children are often accepted and often not."""
    keys = mx.random.split(mx.random.key(seed), 5)
    target = 2 * mx.random.normal((B, N + 1, size), key=keys[0])
    parents = np.array([-1, -1, 0, 0, 1, 3, 3, -1][:N], np.int32)
    draft = target + 0.7 * mx.random.normal(target.shape, key=keys[1])
    rows = mx.array(np.array(draft)[:, parents + 1])
    given = {
        "target_logits": target,
        "draft_tokens": mx.random.categorical(rows, key=keys[2]).astype(mx.int32),
        "parents": mx.array(np.tile(parents, (B, 1))),
        "draft_logits": draft,
        "keys": mx.random.split(keys[3], B),
        "token_bitmask": mx.random.randint(
            -(2**31), 2**31 - 1, (B, N + 1, (size + 31) // 32), key=keys[4]
        ),
    }
    mx.eval(given)
    return given


SAMPLING = Sampling(temperature=0.8, top_k=100, top_p=0.95)


def arrays_of(result) -> list[np.ndarray]:
    return [np.array(x) for x in result if isinstance(x, mx.array)]


def assert_same(got, wanted) -> None:
    for x, y in zip(arrays_of(got), arrays_of(wanted), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_row_alone_and_in_a_batch(backend):
    """The same bits, again and again, alone or among others, with or without the batch axis."""
    given = inputs(B=40, size=3000)
    options = {"sampling": SAMPLING, "logprobs": "raw", "replacement": False}
    whole = backend.verify_tree(**given, **options)
    assert whole.num_accepted.max().item() > 1
    assert_same(backend.verify_tree(**given, **options), whole)
    for b in (0, 17, 39):
        some = backend.verify_tree(**{k: v[b : b + 1] for k, v in given.items()}, **options)
        one = backend.verify_tree(**{k: v[b] for k, v in given.items()}, **options)
        for got, alone, wanted in zip(arrays_of(some), arrays_of(one), arrays_of(whole)):
            np.testing.assert_array_equal(got, wanted[b : b + 1])
            np.testing.assert_array_equal(alone, wanted[b])


def test_padding_a_tree_changes_no_row(backend):
    """Neither more nodes nor the rows behind them enter a keyed row."""
    given = inputs()
    short = backend.verify_tree(**given)
    filler = {"draft_tokens": -1, "parents": 9, "token_bitmask": 0}

    def with_two_more(name: str, value: mx.array) -> mx.array:
        if name == "keys":
            return value
        shape = (len(value), 2, *value.shape[2:])
        more = mx.full(shape, filler.get(name, mx.nan), value.dtype)
        return mx.concatenate([value, more], axis=1)

    padded = {name: with_two_more(name, value) for name, value in given.items()}
    result = backend.verify_tree(**padded)
    assert result.tokens[:, :6].tolist() == short.tokens.tolist()
    assert result.path[:, :5].tolist() == short.path.tolist()
    assert result.status.tolist() == short.status.tolist() == [0] * 6


def test_keys_stand_for_mlx_uniforms(backend):
    B, N, size = 4, 254, 40
    keys = mx.random.split(mx.random.key(6), B)
    target = mx.random.normal((B, N + 1, size), key=mx.random.key(7))
    tokens = mx.random.randint(0, size, (B, N), key=mx.random.key(8))
    parents = mx.broadcast_to(mx.maximum(mx.arange(N) - 20, -1).astype(mx.int32), (B, N))
    uniforms = mx.stack([mx.random.uniform(shape=(256,), key=key) for key in keys])
    keyed = backend.verify_tree(target, tokens, parents, keys=keys)
    replayed = backend.verify_tree(target, tokens, parents, uniforms=uniforms)
    assert keyed.num_accepted.max() > 0
    assert_same(keyed, replayed)


def test_seed(backend):
    """Without explicit noise ``mx.random`` supplies it."""
    target, tokens = mx.zeros((4, 3, 1000)), mx.zeros((4, 2), mx.int32)
    parents = mx.full((4, 2), -1, mx.int32)

    def draws(seed):
        mx.random.seed(seed)
        return [backend.verify_tree(target, tokens, parents).tokens.tolist() for _ in range(2)]

    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert first[0] != first[1]


@pytest.mark.quick(backend=COMPILED_SOON)
@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_compile(backend, replacement):
    @mx.compile
    def verify(given, sampling):
        return backend.verify_tree(
            **given, sampling=sampling, replacement=replacement, logprobs="raw"
        )

    for seed, temperature in enumerate((0.5, 1.0, 0.0)):
        given, sampling = inputs(seed), Sampling(temperature=mx.full((6,), temperature))
        wanted = backend.verify_tree(
            **given, sampling=sampling, replacement=replacement, logprobs="raw"
        )
        assert_same(verify(given, sampling), wanted)


@pytest.mark.quick(backend=COMPILED_SOON)
def test_compile_shapeless(backend):
    """Another batch size neither fails nor gives another result."""
    compiled = mx.compile(lambda given: backend.verify_tree(**given).tokens)
    given = inputs()
    whole = compiled(given).tolist()
    assert compiled({name: value[:4] for name, value in given.items()}).tolist() == whole[:4]


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize(
    "names",
    [
        ("target_logits",),
        ("draft_tokens",),
        ("parents",),
        ("draft_logits",),
        ("keys",),
        ("token_bitmask",),
        ("draft_tokens", "draft_logits"),
        tuple(inputs()),
    ],
    ids="-".join,
)
def test_vmap(backend, names, replacement):
    """Functions of one sequence, mapped over some inputs, give the same bits as a loop."""
    given = inputs()
    given["parents"][2:4] = mx.array([-1, 0, 0, 1, 2], mx.int32)
    shared = {name: value[4] for name, value in given.items() if name not in names}

    def call(*values):
        result = backend.verify_tree(
            **dict(zip(names, values)),
            **shared,
            sampling=SAMPLING,
            replacement=replacement,
            logprobs="raw",
        )
        return tuple(x for x in result if isinstance(x, mx.array))

    got = mx.vmap(call)(*(given[name] for name in names))
    rows = [call(*(given[name][b] for name in names)) for b in range(6)]
    for x, ys in zip(got, zip(*rows), strict=True):
        np.testing.assert_array_equal(np.array(x), np.stack([np.array(y) for y in ys]))


def test_other_streams(backend):
    given = inputs()
    wanted = backend.verify_tree(**given, sampling=SAMPLING)
    for stream in (mx.new_stream(mx.cpu), mx.cpu):
        assert_same(backend.verify_tree(**given, sampling=SAMPLING, stream=stream), wanted)


# Bad arguments


B, N, SIZE, S = 2, 3, 40, 4


def dense(**changes) -> dict:
    """Good arguments with a dense draft, then ``changes``."""
    return {
        "target_logits": mx.zeros((B, N + 1, SIZE)),
        "draft_tokens": mx.zeros((B, N), mx.int32),
        "parents": mx.full((B, N), -1, mx.int32),
        "draft_logits": mx.zeros((B, N + 1, SIZE)),
        "draft_stats": mx.zeros((B, N + 1, 4)),
        "uniforms": mx.zeros((B, N + 2)),
        "token_bitmask": mx.full((B, N + 1, 2), -1, mx.int32),
        **changes,
    }


def sparse(**changes) -> dict:
    given = dense(
        draft_ids=mx.zeros((B, N + 1, S), mx.int32), draft_probs=mx.full((B, N + 1, S), 0.25)
    )
    del given["draft_logits"], given["draft_stats"]
    return {**given, **changes}


def one_hot(**changes) -> dict:
    given = dense()
    del given["draft_logits"], given["draft_stats"]
    return {**given, **changes}


def test_the_good_arguments_are_good(backend):
    for arguments in (dense(), sparse(), one_hot()):
        assert backend.verify_tree(**arguments).status.tolist() == [0] * B


@pytest.mark.parametrize(
    "argument, given",
    [
        ("target_logits", dense(target_logits=mx.zeros((SIZE,)))),
        ("target_logits", dense(target_logits=mx.zeros((1, B, N + 1, SIZE)))),
        ("target_logits", dense(target_logits=mx.zeros((B, N + 1, 0)))),
        ("target_logits", dense(target_logits=mx.zeros((B, N + 1, SIZE), mx.int32))),
        ("draft_tokens", dense(draft_tokens=mx.zeros((B, N + 1), mx.int32))),
        ("draft_tokens", dense(draft_tokens=mx.zeros((B, N), mx.int16))),
        ("parents", dense(parents=mx.zeros((B, N + 1), mx.int32))),
        ("parents", dense(parents=mx.zeros((N,), mx.int32))),
        ("parents", dense(parents=mx.zeros((B, N), mx.uint32))),
        ("parents", dense(parents=mx.zeros((B, N)))),
        ("parents", dense(parents=[[-1] * N] * B)),
        ("parents", dense(parents=None)),
        ("draft_logits", dense(draft_logits=mx.zeros((B, N, SIZE)))),
        ("draft_logits", dense(draft_logits=mx.zeros((B, N + 1, 0)))),
        ("draft_stats", dense(draft_stats=mx.zeros((B, N, 4)))),
        ("draft_stats", sparse(draft_stats=mx.zeros((B, N + 1, 4)))),
        ("draft_ids", sparse(draft_ids=mx.zeros((B, N, S), mx.int32))),
        ("draft_probs", sparse(draft_probs=mx.zeros((B, N + 1, S + 1)))),
        ("draft_probs", one_hot(draft_ids=mx.zeros((B, N + 1, S), mx.int32))),
        ("draft_logits", sparse(draft_logits=mx.zeros((B, N + 1, SIZE)))),
        ("draft_vocab", dense(draft_vocab=mx.zeros((SIZE + 1,), mx.int32))),
        ("draft_vocab", one_hot(draft_vocab=mx.zeros((SIZE,), mx.int32))),
        ("draft_sampling", sparse(draft_sampling=Sampling())),
        ("draft_sampling.top_p", dense(draft_sampling=Sampling(top_p=2.0))),
        ("sampling.temperature", dense(sampling=Sampling(temperature=-1.0))),
        ("sampling.temperature", dense(sampling=Sampling(temperature=mx.ones((B + 1,))))),
        ("sampling", dense(sampling=None)),
        ("uniforms", dense(uniforms=mx.zeros((B, N + 1)))),
        ("uniforms", dense(uniforms=mx.zeros((B, N + 2), mx.float16))),
        ("uniforms", dense(keys=mx.zeros((B, 2), mx.uint32))),
        ("keys", dense(uniforms=None, keys=mx.zeros((B, 2), mx.int32))),
        ("token_bitmask", dense(token_bitmask=mx.zeros((B, N, 2), mx.int32))),
        ("logprobs", dense(logprobs="log")),
        ("replacement", dense(replacement=1)),
        ("replacement", dense(replacement=None)),
        ("stream", dense(stream="cpu")),
    ],
)
def test_bad_argument(backend, argument, given):
    """The message names the operation, the argument, what was expected and what came."""
    with pytest.raises((ValueError, TypeError)) as error:
        mx.eval(backend.verify_tree(**given).tokens)
    message = str(error.value)
    assert message.startswith("[verify_tree] ") and argument in message, message
    assert "expected" in message and "got" in message, message


def test_keys_serve_254_nodes(backend):
    many = 255
    given = {
        "target_logits": mx.zeros((1, many + 1, 2)),
        "draft_tokens": mx.zeros((1, many), mx.int32),
        "parents": mx.arange(-1, many - 1, dtype=mx.int32)[None],
    }
    for noise in ({"keys": mx.zeros((1, 2), mx.uint32)}, {}):
        with pytest.raises(ValueError, match=r"^\[verify_tree\] .*254.*255"):
            backend.verify_tree(**given, **noise)
    result = backend.verify_tree(**given, uniforms=mx.zeros((1, many + 2)))
    assert result.num_accepted.item() == many


def test_no_gradient(fused_backend):
    def loss(logits):
        given = dense(target_logits=logits, logprobs="filtered")
        return fused_backend.verify_tree(**given).logprobs.sum()

    with pytest.raises(ValueError, match="verify_tree.*derivative"):
        mx.eval(mx.grad(loss)(mx.zeros((B, N + 1, SIZE))))

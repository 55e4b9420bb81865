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
from backends import BACKENDS
from exactspec import Sampling
from hypothesis import given as hypothesis_given
from hypothesis import settings
from oracle_tree import CONTEXT, Tree
from strategies import tree_problems
from test_exactness import chi_square
from tolerances import CHI_SQUARE_P, LOGPROB, TIE, TIE_SHARE

TREE_BACKENDS = [backend for backend in BACKENDS if backend.verify_tree]


@pytest.fixture(params=TREE_BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param


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


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("parents", [(-1,), (-1, -1), (-1, 0)], ids=str)
def test_stratified(backend, figure, parents, kind):
    grid = 12 if backend.simulated else 40
    error = joint_error(parents, kind, laws=frequencies_of(backend, grid))
    bound = (len(parents) + 1) / grid
    figure(f"stratified error (bound {bound:.4f})", error)
    assert error <= bound + TIE


# Sampling: chi-square over keyed draws


NUM_DRAWS, CHUNK = 200_000, 10_000
FAMILY = np.array([-1, -1, -1, 0, 0, 1], np.int32)
SAMPLED_BACKENDS = [backend for backend in TREE_BACKENDS if not backend.simulated]


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


def test_replay(backend, figure):
    """The same uniforms give the oracle's ids, on all kinds of input."""
    seen = []

    @settings(max_examples=1000, derandomize=True, deadline=None, database=None)
    @hypothesis_given(tree_problems())
    def replay(problem):
        seen.append(check_replay(backend, problem))

    replay()
    sequences, ties, accepted = np.sum(seen, axis=0)
    figure("share of ties", ties / sequences)
    assert ties <= TIE_SHARE * sequences
    assert accepted > sequences / 4


MANY_SIBLINGS = np.array([-1, -1, -1, -1, -1, 0, 0, 0, 1, 1, 1, 8, 8])


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("kind", ["dense", "padded", "vocab", "sparse", "one-hot"])
def test_replay_many_siblings(backend, figure, kind, replacement):
    """Most siblings are rejected, so that what is left of the target has come a long way."""
    B, N, size = 200, len(MANY_SIBLINGS), 2100
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
    op = {k: mx.array(v) if isinstance(v, np.ndarray) else v for k, v in law.items()}
    for name in ("sampling", "draft_sampling"):
        if name in law:
            values = [mx.array(v) if isinstance(v, np.ndarray) else v for v in law[name]]
            op[name] = Sampling(*values)
    result = backend.verify_tree(**op, replacement=replacement)
    wanted = oracle_tree.verify_tree(**law, replacement=replacement)
    clear = ~wanted.ties
    for name in ("tokens", "path", "num_accepted", "status"):
        got = np.array(getattr(result, name))
        np.testing.assert_array_equal(got[clear], getattr(wanted, name)[clear], err_msg=name)
    figure("share of ties", wanted.ties.mean())
    assert wanted.ties.mean() <= TIE_SHARE
    late = np.isin(wanted.path, [3, 4, 7, 10, 12]).any(axis=1).mean()
    figure("share of sequences that accept after two rejections", late)
    assert late > 0.05

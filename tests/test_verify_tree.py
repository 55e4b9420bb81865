"""``verify_tree``: its law by enumeration, replayed against the oracle, by sampling, and cases."""

from __future__ import annotations

import itertools
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


def joint_error(parents: tuple[int, ...], kind: str, gaps: tuple[int, ...] = ()) -> float:
    """The largest error of the joint law of the first N + 1 tokens, continued by the target."""
    depth = len(parents) + 1
    emitted = {}
    for grown in grow(parents, kind, gaps):
        for prob, path, law in oracle_tree.emitted_law(tree_of(grown, parents, kind)):
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


def drawn_siblings(rng, probs: np.ndarray, parents: np.ndarray, replacement: bool) -> np.ndarray:
    """Tokens ``[B, N]`` from draft rows ``[B, N+1, V]``; ids run out one by one, then it is id 0."""
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

"""The law of :func:`exactspec.verify_tree` from plain ``mx`` operations: same arguments, results.

As in :mod:`exactspec.reference`, whose distributions it uses, whole rows are kept and nothing waits
for a value. Recursive rejection: Miao et al. 2305.09781; without replacement: Jeon et al.
2402.14160.

Shapes: ``B`` sequences, ``N`` nodes, ``V`` token ids, ``S`` entries of a draft distribution.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple, Optional

import mlx.core as mx

from . import ops, tree
from .ops import Status, Stream
from .reference import (
    Draft,
    Rows,
    both,
    dense_draft,
    draw_token,
    either,
    good_noise,
    good_parameters,
    is_greedy,
    noise,
    one_hot_draft,
    over_vocabulary,
    prob_of,
    residual,
    sparse_draft,
    target_distribution,
    token_logprobs,
    total,
    write_tokens,
)
from .sampling import Sampling
from .tree import TreeResult


class Path(NamedTuple):
    """What became of a tree.

    Attributes:
        accepted: bool ``[B, N]``.
        left: ``[B, V]``: what the last node's rejected children have left of its target row.
        emits: bool ``[B]``: whether there is a next token (no bad row was met).
        status: uint32 ``[B]``.
    """

    accepted: mx.array
    left: mx.array
    emits: mx.array
    status: mx.array


def drafts_of_nodes(
    tokens: mx.array,
    parents: mx.array,
    vocab_size: int,
    logits: Optional[mx.array],
    ids: Optional[mx.array],
    probs: Optional[mx.array],
    vocab: Optional[mx.array],
    stats: Optional[mx.array],
    sampling: Sampling,
) -> Draft:
    """What each node ``[B, N]`` was drawn from: the draft's row behind its parent."""
    rows = mx.clip(parents + 1, 0, parents.shape[-1])[..., None]

    def of_nodes(x: Optional[mx.array]) -> Optional[mx.array]:
        return x if x is None else mx.take_along_axis(x, rows, axis=1)

    if logits is not None:
        return dense_draft(tokens, of_nodes(logits), vocab, of_nodes(stats), sampling)
    if ids is not None:
        return sparse_draft(tokens, of_nodes(ids), of_nodes(probs), vocab_size)
    return one_hot_draft(tokens, vocab_size)


def without(ids: Optional[mx.array], probs: mx.array, tokens: mx.array) -> mx.array:
    """Entries ``[B, S]`` renormalised with those of tokens ``[B]`` at 0; all 0 if none is left."""
    if ids is None:
        ids = mx.arange(probs.shape[-1])
    probs = mx.where(ids == tokens[:, None], 0.0, probs)
    mass = total(probs)[:, None]
    return probs / mx.where(mass > 0, mass, 1.0)


def accept_path(
    target: Rows,
    draft: Draft,
    tokens: mx.array,
    parents: mx.array,
    coins: mx.array,
    greedy: mx.array,
    replacement: bool,
) -> Path:
    """Judge the nodes ``[B, N]`` one after the other: children come after their parents.

    ``greedy`` ``[B]``: the target's temperature is 0, so its argmax decides without a coin and the
    draft is not read. ``replacement``: rejected tokens stay in the draft.
    """
    N, vocab_size = tokens.shape[-1], target.logits.shape[-1]
    is_used = tokens != ops.PLACEHOLDER_TOKEN
    bad_parent = both(is_used, either(parents < -1, parents >= mx.arange(N)))
    in_tree = mx.cumprod((~bad_parent).astype(mx.int32), axis=-1).astype(mx.bool_)
    in_tree = both(in_tree, is_used)
    target_good = target.good()

    at = mx.full(tokens.shape[:1], -1)
    left, emits = target.probs[:, 0], target_good[:, 0]
    # Of the node's children: whether the draft has run out, none was rejected yet, and what is
    # left of the draft otherwise.
    skips, is_first = mx.zeros_like(emits), mx.ones_like(emits)
    kept_draft = draft.probs[:, 0] if N else None
    bad_target, bad_draft, off_range, zero_prob = [~emits], [], [], []
    all_accepted = []
    for node in range(N):
        token, ids = tokens[:, node], None if draft.ids is None else draft.ids[:, node]
        draft_left = draft.probs[:, node]
        if not replacement:
            draft_left = mx.where(is_first[:, None], draft_left, kept_draft)
        target_prob = prob_of(None, left[:, None], token[:, None])[:, 0]
        draft_prob = prob_of(
            None if ids is None else ids[:, None], draft_left[:, None], token[:, None]
        )[:, 0]

        tried = both(emits, in_tree[:, node], parents[:, node] == at, ~skips)
        has_place, good = draft.has_place[:, node], draft.good[:, node]
        read = both(tried, has_place, ~greedy)
        # Strictly less: a token the target cannot produce stays out also when the coin is 0.
        passed = mx.where(greedy, target_prob > 0, coins[:, node] * draft_prob < target_prob)
        accepted = both(tried, has_place, either(greedy, good), passed)
        rejected = both(read, good, ~passed)
        off_range.append(both(tried, either(~has_place, token >= vocab_size)))
        bad_draft.append(both(read, ~good))
        zero_prob.append(both(read, good, draft_prob == 0))
        bad_target.append(both(accepted, ~target_good[:, node + 1]))
        emits = both(emits, ~bad_draft[-1], ~bad_target[-1])

        rest = residual(left, over_vocabulary(ids, draft_left, vocab_size))
        rest = rest / total(rest)[:, None]
        left = mx.where(rejected[:, None], rest, left)
        left = mx.where(accepted[:, None], target.probs[:, node + 1], left)
        at = mx.where(accepted, node, at)
        if not replacement:
            rest = without(ids, draft_left, token)
            kept_draft = mx.where(rejected[:, None], rest, kept_draft)
            is_first = either(accepted, both(is_first, ~rejected))
            skips = both(~accepted, either(skips, both(rejected, total(rest) == 0)))
        all_accepted.append(accepted)

    status = mx.where(mx.any(bad_parent, axis=-1), int(Status.BAD_PARENT), 0)
    for bit, conditions in (
        (Status.NON_FINITE_TARGET, bad_target),
        (Status.BAD_DRAFT, bad_draft),
        (Status.OUT_OF_RANGE, off_range),
        (Status.ZERO_DRAFT_PROB, zero_prob),
    ):
        if conditions:
            status = status + mx.where(either(*conditions), int(bit), 0)
    accepted = mx.stack(all_accepted, axis=-1) if N else mx.zeros(tokens.shape, mx.bool_)
    return Path(accepted, left, emits, status.astype(mx.uint32))


def nodes_of(accepted: mx.array) -> mx.array:
    """Accepted nodes ``[B, N]`` in their order, then -1."""
    N = accepted.shape[-1]
    if N == 0:
        return mx.zeros(accepted.shape, mx.int32)
    place = mx.cumsum(accepted.astype(mx.int32), axis=-1) - 1
    here = both(accepted[:, None], place[:, None] == mx.arange(N)[:, None])
    return mx.where(mx.any(here, axis=-1), mx.argmax(here, axis=-1).astype(mx.int32), -1)


def verify_tree(
    target_logits: mx.array,
    draft_tokens: mx.array,
    parents: mx.array,
    *,
    draft_logits: Optional[mx.array] = None,
    draft_ids: Optional[mx.array] = None,
    draft_probs: Optional[mx.array] = None,
    draft_vocab: Optional[mx.array] = None,
    draft_stats: Optional[mx.array] = None,
    sampling: Sampling = Sampling(),
    draft_sampling: Optional[Sampling] = None,
    replacement: bool = True,
    uniforms: Optional[mx.array] = None,
    keys: Optional[mx.array] = None,
    token_bitmask: Optional[mx.array] = None,
    logprobs: Optional[str] = None,
    stream: Stream = None,
) -> TreeResult:
    """:func:`exactspec.verify_tree` from plain ``mx`` operations; same arguments and results."""
    ops.check_arrays("verify_tree", target_logits=target_logits)
    keys = ops.resolve_noise("verify_tree", "token", target_logits.shape[:-2], uniforms, keys)
    # Arrays are lazy: building the fused operation checks the arguments and evaluates nothing.
    fused = tree.verify_tree(
        target_logits,
        draft_tokens,
        parents,
        draft_logits=draft_logits,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        draft_vocab=draft_vocab,
        draft_stats=draft_stats,
        sampling=sampling,
        draft_sampling=draft_sampling,
        replacement=replacement,
        uniforms=uniforms,
        keys=keys,
        token_bitmask=token_bitmask,
        logprobs=logprobs,
        stream=stream,
    )
    if target_logits.size == 0:  # no sequences, and reductions of nothing raise
        return fused
    has_batch = target_logits.ndim == 3

    def batched(x: Optional[mx.array]) -> Optional[mx.array]:
        return x if x is None or has_batch else x[None]

    with nullcontext() if stream is None else mx.stream(stream):
        logits, tokens = batched(target_logits), batched(draft_tokens).astype(mx.int32)
        nodes = batched(parents)
        N, vocab_size = tokens.shape[-1], logits.shape[-1]
        valid = both(good_parameters(sampling), good_noise(batched(uniforms)))
        target = target_distribution(logits, sampling, batched(token_bitmask))
        if draft_logits is not None:
            draft_sampling = draft_sampling or sampling
            valid = both(valid, good_parameters(draft_sampling))
        draft_rows = [batched(x) for x in (draft_logits, draft_ids, draft_probs)]
        draft = None
        if N > 0:
            draft = drafts_of_nodes(
                tokens,
                nodes,
                vocab_size,
                *draft_rows,
                draft_vocab,
                batched(draft_stats),
                draft_sampling,
            )
        coins, pair = noise(batched(uniforms), batched(keys), N)
        greedy = is_greedy(sampling)[:, 0, 0]
        stays = replacement or (draft_logits is None and draft_ids is None)
        path = accept_path(target, draft, tokens, nodes, coins, greedy, stays)
        drawn = draw_token(path.left, pair)

        next_token = mx.where(both(valid, path.emits), drawn, ops.PLACEHOLDER_TOKEN)
        accepted = both(valid[:, None], path.accepted)
        status = mx.where(valid, path.status, int(Status.BAD_PARAMETER)).astype(mx.uint32)
        accepted_nodes = nodes_of(accepted)
        num_accepted = mx.sum(accepted, axis=-1).astype(mx.int32)
        path_tokens = tokens
        if N > 0:
            path_tokens = mx.take_along_axis(tokens, mx.maximum(accepted_nodes, 0), axis=-1)
        emitted = write_tokens(path_tokens, num_accepted, next_token)

        results = [emitted, accepted_nodes, num_accepted, status]
        if logprobs:
            first = mx.zeros((tokens.shape[0], 1), mx.int32)
            rows = mx.concatenate([first, accepted_nodes + 1], axis=-1)[..., None]
            target = target._replace(
                logits=mx.take_along_axis(target.logits, rows, axis=1),
                stats=mx.take_along_axis(target.stats, rows, axis=1),
            )
            logits = mx.take_along_axis(logits, rows, axis=1)
            results.append(token_logprobs(logprobs, logits, target, emitted))
        if not has_batch:
            results = [x[0] for x in results]
    return TreeResult(*results)

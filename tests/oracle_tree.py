"""The law of ``verify_tree`` in float64 NumPy, written from the documented law alone.

Like :mod:`oracle`, whose distributions and words it uses: one sequence at a time, one node after
the other. :func:`walk` leaves it open how a child's coin falls, so that the same steps serve to
replay given coins (:func:`verify_tree`) and to go through all of them (:func:`emitted_law`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import oracle
from oracle import (
    BAD_DRAFT,
    BAD_PARAMETER,
    NON_FINITE_TARGET,
    OUT_OF_RANGE,
    PLACEHOLDER,
    ZERO_DRAFT_PROB,
    Draft,
    Row,
    Sampling,
    exact,
)
from tolerances import PROBABILITY, TIE

BAD_PARENT = 16
CONTEXT = -1


class Verified(NamedTuple):
    tokens: np.ndarray  # [B, N+1] int32
    path: np.ndarray  # [B, N] int32
    num_accepted: np.ndarray  # [B] int32
    status: np.ndarray  # [B] uint32
    logprobs: np.ndarray | None  # [B, N+1]
    ties: np.ndarray  # [B] bool: a decision was a tie
    doubtful: np.ndarray  # [B, N+1] bool: the token's row hangs on a filter's tie


class Tree(NamedTuple):
    """What ``verify_tree`` is given for one sequence: its inputs without the batch axis."""

    target_logits: np.ndarray  # [N+1, V]
    draft_tokens: list[int]  # N
    parents: list[int]  # N
    draft_logits: np.ndarray | None = None  # [N+1, Vd]
    draft_ids: np.ndarray | None = None  # [N+1, S]
    draft_probs: np.ndarray | None = None  # [N+1, S]
    draft_vocab: np.ndarray | None = None  # [Vd]
    draft_stats: np.ndarray | None = None  # [N+1, 4]
    sampling: Sampling = oracle.DEFAULT
    draft_sampling: Sampling = oracle.DEFAULT
    replacement: bool = True
    token_bitmask: np.ndarray | None = None  # [N+1, ceil(V/32)]

    def one_hot(self) -> bool:
        return self.draft_logits is None and self.draft_ids is None

    def end(self) -> int:
        """The first node in use whose parent does not come before it."""
        for node, (token, parent) in enumerate(zip(self.draft_tokens, self.parents)):
            if token != PLACEHOLDER and not CONTEXT <= parent < node:
                return node
        return len(self.parents)

    def children(self, node: int) -> list[int]:
        return [
            child
            for child in range(self.end())
            if self.parents[child] == node and self.draft_tokens[child] != PLACEHOLDER
        ]

    def target(self, node: int) -> Row | None:
        """The row behind a node; None if it is bad."""
        bitmask = None if self.token_bitmask is None else self.token_bitmask[node + 1]
        logits = oracle.masked(exact(self.target_logits[node + 1]), bitmask)
        return None if oracle.bad_logits(logits) else oracle.distribution(logits, self.sampling)

    def draft(self, node: int) -> Draft | None:
        """What a node's children were drawn from, unless they are one-hot; None if it is bad."""
        row = node + 1
        if self.draft_logits is None:
            return oracle.sparse_draft(self.draft_ids[row], self.draft_probs[row])
        # draft_stats restate the row, so that there is nothing in them to use but a NaN.
        if self.draft_stats is not None and np.isnan(self.draft_stats[row]).any():
            return None
        return oracle.dense_draft(self.draft_logits[row], self.draft_vocab, self.draft_sampling)

    def producible(self, node: int, token: int) -> bool:
        """Whether the draft behind a node has a place for the token, whatever its probability."""
        if token < 0:
            return False
        if self.draft_logits is not None:
            if self.draft_vocab is None:
                return token < self.draft_logits.shape[1]
            return bool((self.draft_vocab == token).any())
        if self.draft_ids is not None and (self.draft_ids[node + 1] == token).any():
            return True
        return token < self.target_logits.shape[1]


# Recursive rejection


class Left(NamedTuple):
    """What rejected children have left of a target row."""

    probs: np.ndarray  # [V]
    error: np.ndarray  # [V]: how far float32 may be off, and what the filters leave in doubt
    slack: float  # mass that may be on ids in doubt
    unclear: bool  # float32 may leave ids mass that the law does not


def left_of(target: Row) -> Left:
    return Left(target.probs, target.slack * target.probs, target.slack, False)


def residual(left: Left, draft: Draft) -> tuple[Left, bool]:
    """``max(target - draft, 0)`` renormalised, the target where no mass is left; if it is a tie."""
    taken = draft.over(len(left.probs))
    rest = np.maximum(left.probs - taken, 0.0)
    rounding = PROBABILITY * (left.probs + taken) + draft.slack * taken
    error = left.error + np.where(left.probs > 0, rounding, 0.0)
    slack = left.slack + draft.slack
    at_edge = (left.probs > 0) & (taken > 0) & (abs(left.probs - taken) <= error)
    unclear = left.unclear or bool(at_edge.any())
    mass, doubt = rest.sum(), error.sum() + slack
    tie = mass <= doubt and (unclear or slack > 0)
    if mass == 0:
        return left, tie
    rest = rest / mass
    return Left(rest, (error + doubt * rest) / mass, slack / mass, unclear), tie


def without(draft: Draft, token: int) -> tuple[Draft, bool]:
    """The draft without a token, renormalised unless nothing is left; if it is a tie."""
    there = draft.ids != token
    probs, in_doubt = np.where(there, draft.probs, 0.0), draft.in_doubt & there
    tie = in_doubt.any() and not (probs > 0)[~in_doubt].any()
    mass = probs.sum() or 1.0
    return Draft(draft.ids, probs / mass, in_doubt, draft.slack / mass), bool(tie)


class Outcome(NamedTuple):
    path: list[int]
    left: Left | None  # the law of the next token; None if there is none
    target: Row | None  # the row that it was made of
    status: int
    tie: bool


Coin = Callable[[int, Left, Draft], bool]


def walk(given: Tree, accepts: Coin) -> Outcome:
    """Accept a path; ``accepts(node, left, draft)`` says how the coin of a node falls."""
    if given.sampling.bad() or (given.draft_logits is not None and given.draft_sampling.bad()):
        return Outcome([], None, None, BAD_PARAMETER, False)
    status = BAD_PARENT if given.end() < len(given.parents) else 0
    path, at, tie = [], CONTEXT, False
    while True:
        target = given.target(at)
        if target is None:
            return Outcome(path, None, None, status | NON_FINITE_TARGET, tie)
        left, draft, accepted = left_of(target), None, None
        for node in given.children(at):
            token = given.draft_tokens[node]
            if not given.producible(at, token):
                status |= OUT_OF_RANGE
                continue
            if token >= len(target.probs):
                status |= OUT_OF_RANGE
            if given.sampling.greedy():  # no coin, and the draft is not read
                if token == target.probs.argmax():
                    accepted = node
                    break
                continue
            if given.one_hot():
                draft = oracle.one_hot_draft(token)
            elif draft is None:
                draft = given.draft(at)
                if draft is None:
                    return Outcome(path, None, None, status | BAD_DRAFT, tie)
            if draft.of(token) == 0:
                status |= ZERO_DRAFT_PROB
            in_vocab = token < len(target.probs)
            tie |= in_vocab and bool(target.in_doubt[token])
            tie |= bool(draft.in_doubt[draft.ids == token].any())
            if accepts(node, left, draft):
                accepted = node
                break
            left, residual_tie = residual(left, draft)
            tie |= residual_tie
            if not given.replacement and not given.one_hot():
                draft, draft_tie = without(draft, token)
                tie |= draft_tie
                if not draft.probs.any():  # the remaining siblings are skipped
                    break
        if accepted is None:
            return Outcome(path, left, target, status, tie)
        path.append(accepted)
        at = accepted


# The law itself


class Coins:
    """Coins that fall as told, and then stop the walk."""

    class Unknown(Exception):
        pass

    def __init__(self, given: Tree, falls: list[bool]):
        self.given, self.falls, self.place = given, falls, 0
        self.prob = 0.0  # of acceptance, where the walk was stopped

    def __call__(self, node: int, left: Left, draft: Draft) -> bool:
        if self.place == len(self.falls):
            token = self.given.draft_tokens[node]
            target_prob = left.probs[token] if token < len(left.probs) else 0.0
            draft_prob = draft.of(token)
            certain = float(target_prob > 0)
            self.prob = min(1.0, target_prob / draft_prob) if draft_prob else certain
            raise self.Unknown
        self.place += 1
        return self.falls[self.place - 1]


def emitted_law(given: Tree, coins_of=Coins) -> list[tuple[float, list[int], np.ndarray]]:
    """Over all coins: probability, accepted nodes, and the law ``[V]`` of the token after them."""
    laws, open_walks = [], [(1.0, [])]
    while open_walks:
        prob, falls = open_walks.pop()
        coins = coins_of(given, falls)
        try:
            outcome = walk(given, coins)
        except Coins.Unknown:
            for fall, share in ((True, coins.prob), (False, 1 - coins.prob)):
                if share > 0:
                    open_walks.append((prob * share, [*falls, fall]))
            continue
        laws.append((prob, outcome.path, outcome.left.probs))
    return laws


# The operation


def verify_tree(
    target_logits: np.ndarray,
    draft_tokens: np.ndarray,
    parents: np.ndarray,
    *,
    draft_logits: np.ndarray | None = None,
    draft_ids: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_vocab: np.ndarray | None = None,
    draft_stats: np.ndarray | None = None,
    sampling: Sampling = oracle.DEFAULT,
    draft_sampling: Sampling | None = None,
    replacement: bool = True,
    uniforms: np.ndarray,
    token_bitmask: np.ndarray | None = None,
    logprobs: str | None = None,
) -> Verified:
    """A batch: shapes as the operation's."""
    B, N = draft_tokens.shape
    tokens = np.full((B, N + 1), PLACEHOLDER, np.int32)
    path = np.full((B, N), -1, np.int32)
    num_accepted, status = np.zeros(B, np.int32), np.zeros(B, np.uint32)
    logs = np.full((B, N + 1), np.nan)
    ties, doubtful = np.zeros(B, bool), np.zeros((B, N + 1), bool)

    def of_sequence(values: np.ndarray | None, b: int) -> np.ndarray | None:
        return None if values is None else np.asarray(values)[b]

    for b in range(B):
        given = Tree(
            target_logits[b],
            [int(token) for token in draft_tokens[b]],
            [int(parent) for parent in parents[b]],
            of_sequence(draft_logits, b),
            of_sequence(draft_ids, b),
            of_sequence(draft_probs, b),
            draft_vocab,
            of_sequence(draft_stats, b),
            sampling.of_sequence(b),
            (draft_sampling or sampling).of_sequence(b),
            replacement,
            of_sequence(token_bitmask, b),
        )
        outcome, next_token, ties[b] = decide(given, exact(uniforms[b]))
        accepted = len(outcome.path)
        num_accepted[b], status[b] = accepted, outcome.status
        path[b, :accepted] = outcome.path
        tokens[b, :accepted] = draft_tokens[b, outcome.path]
        tokens[b, accepted] = next_token
        for i in range(accepted + (next_token != PLACEHOLDER)):
            row = outcome.path[i - 1] + 1 if i else 0
            target = given.target(row - 1)
            doubtful[b, i] = target.slack > 0
            if logprobs == "raw":
                logs[b, i] = oracle.raw_logprob(target_logits[b, row], tokens[b, i])
            elif logprobs == "filtered":
                logs[b, i] = np.log(target.probs[tokens[b, i]])
    return Verified(tokens, path, num_accepted, status, logs if logprobs else None, ties, doubtful)


def decide(given: Tree, uniforms: np.ndarray) -> tuple[Outcome, int, bool]:
    """What given uniforms ``[N+2]`` lead to, the next token, and whether a decision was a tie."""
    if oracle.bad_uniforms(uniforms):
        return Outcome([], None, None, BAD_PARAMETER, False), PLACEHOLDER, False
    coins, pair = np.split(uniforms, [-2])
    ties = []

    def accepts(node: int, left: Left, draft: Draft) -> bool:
        token = given.draft_tokens[node]
        in_vocab = token < len(left.probs)
        target_prob, error = (left.probs[token], left.error[token]) if in_vocab else (0.0, 0.0)
        draft_prob = draft.of(token)
        threshold = coins[node] * draft_prob
        margin = TIE * draft_prob + error + draft.slack * threshold
        ties.append(max(target_prob, error) > 0 and abs(threshold - target_prob) <= margin)
        return bool(threshold < target_prob)

    outcome = walk(given, accepts)
    tie = outcome.tie or any(ties)
    if outcome.left is None:
        return outcome, PLACEHOLDER, tie
    left = outcome.left
    rounding = left.error + PROBABILITY * left.probs
    at_ends = left.slack > 0 or left.unclear
    token, draw_tie = oracle.draw_weights(left.probs, rounding, left.slack, at_ends, pair)
    return outcome, token, bool(tie or draw_tie or outcome.target.in_doubt[token])

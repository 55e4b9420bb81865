"""The law of ``verify_draft`` and ``sample`` in float64 NumPy: the reference that tests trust.

It is written from the documented law alone, shares no code with the package, and goes through one
sequence at a time, one step after the other, so that it can be checked by reading.

Logits and parameters are rounded to float32 first, as the operations do, and computed in float64
from there. Where float32 arithmetic may legitimately decide otherwise, the oracle says so: a *tie*
is a sequence in which some decision lay within ``tolerances.TIE`` of its threshold.

Words: ``target`` and ``draft`` are distributions after temperature and filters; a *row* is one
distribution over ids ``0..V-1``; slot ``i`` holds draft token ``i`` and is judged by target row
``i``; with ``n`` drafts, row ``n`` is the bonus row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tolerances import FLUSHED_WEIGHT, PROBABILITY, TIE

DRAW_BLOCK = 2048
PLACEHOLDER = -1
NON_FINITE_TARGET, BAD_DRAFT, OUT_OF_RANGE, ZERO_DRAFT_PROB, BAD_PARAMETER = 1, 2, 4, 8, 32

Number = float | np.ndarray


class Typical(NamedTuple):
    """A lossy rule: accept what the target finds plausible."""

    epsilon: float = 0.09
    delta: float = 0.3


class Cascade(NamedTuple):
    """A lossy rule: accept where the draft is about as confident as the target."""

    alpha: float = 0.0


Rule = str | Typical | Cascade


class Sampling(NamedTuple):
    """Each field but ``order`` is a number or an array ``[B]``."""

    temperature: Number = 1.0
    top_k: Number = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    order: str = "temperature_first"

    def of_sequence(self, b: int) -> Sampling:
        """The parameters of sequence ``b``, as numbers."""
        values = [v[b] if np.ndim(v) else v for v in self[:4]]
        temperature, top_p, min_p = (float(np.float32(values[i])) for i in (0, 2, 3))
        return Sampling(temperature, int(values[1]), top_p, min_p, self.order)

    def bad(self) -> bool:
        good = 0 <= self.temperature < np.inf and 0 <= self.top_p <= 1 and 0 <= self.min_p <= 1
        return not good  # no comparison holds for NaN

    def greedy(self) -> bool:
        return self.temperature < 2.0**-126


DEFAULT = Sampling()

# Orders in which temperature comes after the filters.
UNTEMPERED = ("temperature_last", "sequential_untempered")


def bad_uniforms(uniforms: np.ndarray | None) -> bool:
    """Whether a sequence's uniforms, used or not, are not all in [0, 1)."""
    return uniforms is not None and not all(0 <= u < 1 for u in uniforms)


class Row(NamedTuple):
    """A filtered distribution, its four-number summary, and what float32 leaves in doubt."""

    probs: np.ndarray  # [V]
    scaled: np.ndarray  # [V]: (logit - largest) / temperature
    stats: np.ndarray  # [4]: largest logit, log of the kept weights' sum, cutoff logit, cutoff id
    in_doubt: np.ndarray  # [V] bool: ids a filter may or may not keep, or of a flushed weight
    slack: float  # relative change of every probability if all the ids in doubt were kept, or none


class Draft(NamedTuple):
    """A draft distribution as the ids it can produce, with repetitions, and their probabilities."""

    ids: np.ndarray  # [S]
    probs: np.ndarray  # [S]
    in_doubt: np.ndarray  # [S] bool
    slack: float

    def of(self, token: int) -> float:
        return float(self.probs[self.ids == token].sum())

    def over(self, size: int) -> np.ndarray:
        """Probabilities of ids ``0..size-1``; the mass of other ids is left out."""
        inside = (self.ids >= 0) & (self.ids < size)
        return np.bincount(self.ids[inside], self.probs[inside], minlength=size)

    def by_id(self) -> np.ndarray:
        """One probability per distinct id."""
        _, index = np.unique(self.ids, return_inverse=True)
        return np.bincount(index, self.probs)


class Stats(NamedTuple):
    """Per draft slot, each ``[B, K]``; NaN at slots without a draft."""

    accept_prob: np.ndarray
    overlap: np.ndarray
    target_entropy: np.ndarray
    draft_entropy: np.ndarray


class Verified(NamedTuple):
    tokens: np.ndarray  # [B, K+1] int32
    num_accepted: np.ndarray  # [B] int32
    status: np.ndarray  # [B] uint32
    logprobs: np.ndarray | None  # [B, K+1]
    stats: Stats | None
    ties: np.ndarray  # [B] bool: a decision in a reached slot was a tie
    doubtful: np.ndarray  # [B, K+1] bool: row i's probabilities hang on a filter's tie


class Sampled(NamedTuple):
    tokens: np.ndarray  # [B] int32
    status: np.ndarray  # [B] uint32
    logprobs: np.ndarray | None  # [B]
    row_stats: np.ndarray  # [B, 4]
    ties: np.ndarray  # [B] bool
    doubtful: np.ndarray  # [B] bool


# From logits to a distribution


def exact(values: np.ndarray) -> np.ndarray:
    """Float32 values, in float64."""
    return np.asarray(values, np.float32).astype(np.float64)


def bad_logits(logits: np.ndarray) -> bool:
    return bool(np.isnan(logits).any() or (logits == np.inf).any() or (logits == -np.inf).all())


def masked(logits: np.ndarray, bitmask: np.ndarray | None) -> np.ndarray:
    """Logits ``[V]`` with the ids whose bit is 0 in ``bitmask [ceil(V/32)]`` at -inf."""
    if bitmask is None:
        return logits
    ids = np.arange(len(logits))
    words = np.asarray(bitmask).astype(np.int64)[ids // 32]
    return np.where((words >> (ids % 32)) & 1 == 1, logits, -np.inf)


def kept_counts(weights: np.ndarray, sampling: Sampling) -> tuple[int, int, int]:
    """How many ids the filters keep: surely, by the law, and possibly.

    ``weights`` are relative to the largest and in the order of the cut: logit descending, then id
    ascending. Every filter keeps a prefix, so the filters together keep the shortest one.
    """
    size = len(weights)
    mass_before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])

    def top_k(survivors: int, margin: float) -> int:
        return min(survivors, sampling.top_k) if sampling.top_k > 0 else survivors

    def top_p(survivors: int, margin: float, measured_on: int | None = None) -> int:
        if sampling.top_p in (0.0, 1.0):
            return survivors
        total = weights[: measured_on or survivors].sum()
        return min(survivors, int((mass_before / total < sampling.top_p + margin).sum()))

    def min_p(survivors: int, margin: float) -> int:
        # Relative to the largest weight, which always survives: so whatever was filtered before.
        if sampling.min_p == 0.0:
            return survivors
        return min(survivors, max(int((weights >= sampling.min_p - margin).sum()), 1))

    def top_p_of_all(survivors: int, margin: float) -> int:
        return top_p(survivors, margin, measured_on=size)

    chain = {
        "temperature_first": (top_k, top_p_of_all, min_p),
        "temperature_last": (top_p_of_all, min_p, top_k),
        "sequential": (top_k, top_p, min_p),
        "sequential_untempered": (top_k, top_p, min_p),
        "min_p_first": (min_p, top_k, top_p),
    }[sampling.order]
    counts = []
    for margin in (-TIE, 0.0, TIE):
        survivors = size
        for step in chain:
            survivors = max(step(survivors, margin), 1)
        counts.append(survivors)
    sure, kept, possible = counts
    return sure, kept, possible


def distribution(logits: np.ndarray, sampling: Sampling) -> Row:
    """The distribution of one good row of logits ``[V]`` under the parameters of one sequence."""
    logits = exact(logits)
    order = np.argsort(-logits, kind="stable")
    below = logits[order] - logits[order[0]]
    with np.errstate(over="ignore"):
        scaled = below if sampling.greedy() else below / sampling.temperature
    if sampling.greedy():
        tempered = (np.arange(len(below)) == 0).astype(np.float64)
    else:
        tempered = np.exp(scaled)
    untempered = np.exp(below)
    measured = untempered if sampling.order in UNTEMPERED else tempered
    sure, kept, possible = (1, 1, 1) if sampling.greedy() else kept_counts(measured, sampling)

    total = tempered[:kept].sum()
    probs, in_doubt = np.zeros(len(logits)), np.zeros(len(logits), bool)
    probs[order[:kept]] = tempered[:kept] / total
    scaled[order] = scaled.copy()
    in_doubt[order[sure:possible]] = True
    flushed = (tempered > 0) & (tempered < FLUSHED_WEIGHT)
    in_doubt[order[:possible][flushed[:possible]]] = True
    slack = tempered[:possible].sum() / tempered[:sure].sum() - 1
    cutoff = order[kept - 1]
    stats = np.array([logits[order[0]], np.log(total), logits[cutoff], cutoff])
    return Row(probs, scaled, stats, in_doubt, slack)


def dense_draft(logits: np.ndarray, vocab: np.ndarray | None, sampling: Sampling) -> Draft | None:
    """The draft of one row of draft logits ``[Vd]``; None if the row is bad."""
    if bad_logits(exact(logits)):
        return None
    row = distribution(logits, sampling)
    ids = np.arange(len(logits)) if vocab is None else np.asarray(vocab)
    return Draft(ids, row.probs, row.in_doubt, row.slack)


def sparse_draft(ids: np.ndarray, probs: np.ndarray) -> Draft | None:
    """The draft of a support ``[S]`` and its final probabilities; None if they are bad."""
    listed = np.asarray(ids) >= 0
    ids, probs = np.asarray(ids)[listed], exact(probs)[listed]
    if not np.isfinite(probs).all() or (probs < 0).any() or probs.sum() > 1.001:
        return None
    return Draft(ids, probs, np.zeros(len(ids), bool), 0.0)


def one_hot_draft(token: int) -> Draft:
    return Draft(np.array([token]), np.ones(1), np.zeros(1, bool), 0.0)


# Drawing a token


def pick(mass: np.ndarray, uniform: float, doubt: float, at_ends: bool) -> tuple[int, bool]:
    """The first index whose inclusive cumulative mass is ``> uniform * total``, and if it is a tie.

    A tie: a boundary of the chosen index lies within ``doubt`` of ``uniform * total``. The two ends
    of the whole range count as boundaries only ``at_ends``: when ids without mass may have some.
    """
    cumulative = np.cumsum(mass)
    total = cumulative[-1]
    above = np.flatnonzero(cumulative > uniform * total)
    index = above[0] if len(above) else np.flatnonzero(mass)[-1]
    low = cumulative[index - 1] if index else 0.0
    high = cumulative[index]
    near_low = uniform * total - low <= doubt and (at_ends or low > 0)
    near_high = high - uniform * total <= doubt and (at_ends or mass[index + 1 :].any())
    return int(index), bool(near_low or near_high)


class Weight(NamedTuple):
    """A factor of the target, and the largest relative error that float32 may give it."""

    value: float
    error: float


ONE = Weight(1.0, 0.0)


def residual(target: Row, draft: Draft | None, weight: Weight) -> tuple[np.ndarray, np.ndarray]:
    """``weight * target - draft`` ``[V]``, negative values too, and the rounding of each."""
    scaled = weight.value * target.probs
    taken = np.zeros(len(scaled)) if draft is None else draft.over(len(scaled))
    rounding = PROBABILITY * (scaled + taken) + weight.error * scaled
    return scaled - taken, np.where(scaled > 0, rounding, 0.0)


def draw(
    target: Row, draft: Draft | None, pair: np.ndarray, weight: Weight = ONE
) -> tuple[int, bool]:
    """A token of the target, or of ``max(weight * target - draft, 0)``; and if it is a tie."""
    left, rounding = residual(target, draft, weight)
    weights = np.maximum(left, 0.0)
    rounding = np.where(left < -rounding, 0.0, rounding)
    slack = target.slack + (0.0 if draft is None else draft.slack)
    # Where both are equal up to rounding, float32 may leave an id mass that the law does not.
    unclear = draft is not None and bool(((rounding > 0) & (abs(left) <= rounding)).any())
    at_ends = slack > 0 or unclear

    no_mass = weights.sum() == 0
    tie = draft is not None and weights.sum() <= rounding.sum() + slack and at_ends
    if no_mass:
        weights = target.probs

    token, draw_tie = draw_weights(weights, rounding, slack, at_ends, pair)
    return token, bool(tie or draw_tie or target.in_doubt[token])


def draw_weights(
    weights: np.ndarray, rounding: np.ndarray, slack: float, at_ends: bool, pair: np.ndarray
) -> tuple[int, bool]:
    """A token of weights ``[V]`` that are off by up to ``rounding [V]``; and if it is a tie.

    Inverse CDF in id order, in two levels: ``pair[0]`` chooses a block of DRAW_BLOCK ids,
    ``pair[1]`` the id inside it.
    """
    starts = np.arange(0, len(weights), DRAW_BLOCK)
    blocks, block_rounding = (np.add.reduceat(x, starts) for x in (weights, rounding))
    block, tie_1 = pick(blocks, pair[0], TIE * blocks.sum() + rounding.sum() + slack, at_ends)
    inside = weights[starts[block] : starts[block] + DRAW_BLOCK]
    doubt = TIE * blocks[block] + block_rounding[block] + slack
    offset, tie_2 = pick(inside, pair[1], doubt, at_ends)
    return int(starts[block]) + offset, tie_1 or tie_2


# The noise of the coupled rule


def threefry2x32(key: np.ndarray, first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) of counters ``(first, second)``, uint32."""
    schedule = [*np.asarray(key, np.uint32), np.uint32(0x1BD11BDA) ^ key[0] ^ key[1]]
    words = [np.uint32(first) + schedule[0], np.uint32(second) + schedule[1]]
    turns = [13, 15, 26, 6, 17, 29, 16, 24]
    for round_number in range(1, 21):
        turn = np.uint32(turns[(round_number - 1) % 8])
        words[0] = words[0] + words[1]
        words[1] = (words[1] << turn) | (words[1] >> (np.uint32(32) - turn))
        words[1] = words[1] ^ words[0]
        if round_number % 4 == 0:
            injection = round_number // 4
            words[0] = words[0] + schedule[injection % 3]
            words[1] = words[1] + schedule[(injection + 1) % 3] + np.uint32(injection)
    return words


def gumbel_of(words: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of random words, uint32.

    The uniform that a word stands for is a float32 by definition, one rounding of an exact product
    plus 2**-33, so that every implementation has the same; the logarithms are the law's.
    """
    words = np.asarray(words, np.uint32).astype(np.float32)
    x = words * np.float32(2.0**-32) + np.float32(2.0**-33)
    x = np.minimum(x, np.float32(1 - 2.0**-24)).astype(np.float64)
    return -np.log(-np.log1p(-x))


def gumbel(key: np.ndarray, position: int, size: int) -> np.ndarray:
    """The noise of ids ``0..size-1`` at a position: a function of key, position and id alone."""
    ids = np.arange(size)
    pairs = (ids >> 1).astype(np.uint32)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**32
        words = threefry2x32(key, np.full(size, position % 2**32, np.uint32), pairs)
    return gumbel_of(np.where(ids & 1, words[1], words[0]))


def choose(target: Row, greedy: bool, key: np.ndarray, position: int) -> tuple[int, bool]:
    """The kept id of the largest ``scaled + noise``, the lowest of equals; and if it is a tie."""
    if greedy:
        return int(target.probs.argmax()), False
    scores = target.scaled + gumbel(key, position, len(target.probs))
    best = int(np.where(target.probs > 0, scores, -np.inf).argmax())
    possible = (target.probs > 0) | target.in_doubt
    possible[best] = False
    rival = scores[possible].max(initial=-np.inf)
    return best, bool(rival >= scores[best] - TIE or target.in_doubt[best])


# The operations


def entropy(probs: np.ndarray) -> float:
    """In nats."""
    positive = probs[probs > 0]
    return float(-(positive * np.log(positive)).sum())


def raw_logprob(logits: np.ndarray, token: int) -> float:
    """Log-softmax of the logits as given: NaN if a masked one among them is bad."""
    logits = exact(logits)
    top = logits.max()
    with np.errstate(invalid="ignore"):
        return float(logits[token] - top - np.log(np.exp(logits - top).sum()))


class Sequence(NamedTuple):
    """What ``verify_draft`` is given for one sequence: its inputs without the batch axis."""

    target_logits: np.ndarray  # [K+1, V]
    draft_tokens: list[int]  # K
    draft_logits: np.ndarray | None  # [K, Vd]
    draft_ids: np.ndarray | None  # [K, S]
    draft_probs: np.ndarray | None  # [K, S]
    draft_vocab: np.ndarray | None  # [Vd]
    draft_length: int | None
    draft_stats: np.ndarray | None  # [K, 4]
    sampling: Sampling
    draft_sampling: Sampling
    rule: Rule
    uniforms: np.ndarray | None  # [K+2]
    key: np.ndarray | None  # [2], of the coupled rule
    position: int | None
    token_bitmask: np.ndarray | None  # [K+1, ceil(V/32)]

    def num_draft_tokens(self) -> int:
        if self.draft_length is not None:
            return min(max(self.draft_length, 0), len(self.draft_tokens))
        unused = [i for i, token in enumerate(self.draft_tokens) if token == PLACEHOLDER]
        return unused[0] if unused else len(self.draft_tokens)

    def target(self, i: int) -> Row | None:
        """Target row ``i``; None if it is bad."""
        bitmask = None if self.token_bitmask is None else self.token_bitmask[i]
        logits = masked(exact(self.target_logits[i]), bitmask)
        return None if bad_logits(logits) else distribution(logits, self.sampling)

    def draft(self, i: int) -> Draft | None:
        """The draft distribution of slot ``i``; None if it is bad."""
        if self.draft_logits is not None:
            # draft_stats restate the row, so that there is nothing in them to use but a NaN.
            if self.draft_stats is not None and np.isnan(self.draft_stats[i]).any():
                return None
            return dense_draft(self.draft_logits[i], self.draft_vocab, self.draft_sampling)
        if self.draft_ids is not None:
            return sparse_draft(self.draft_ids[i], self.draft_probs[i])
        return one_hot_draft(self.draft_tokens[i])

    def producible(self, i: int) -> bool:
        """Whether the draft has a place for the token of slot ``i``, whatever its probability."""
        token, vocab_size = self.draft_tokens[i], self.target_logits.shape[1]
        if token < 0:
            return False
        if self.draft_logits is not None:
            if self.draft_vocab is None:
                return token < self.draft_logits.shape[1]
            return bool((self.draft_vocab == token).any())
        if self.draft_ids is not None and (self.draft_ids[i] == token).any():
            return True
        return token < vocab_size


class Decision(NamedTuple):
    num_accepted: int
    next_token: int  # residual or bonus token; PLACEHOLDER if there is none
    status: int
    tie: bool


def draw_target(given: Sequence, i: int, target: Row) -> tuple[int, bool]:
    """The target's own token of row ``i``, and if it is a tie."""
    if given.rule == "coupled":
        return choose(target, given.sampling.greedy(), given.key, given.position + i)
    return draw(target, None, exact(given.uniforms[-2:]))


def is_typical(target: Row, token: int, rule: Typical) -> tuple[bool, bool]:
    """Whether the typical rule accepts, and if that is a tie."""
    target_prob = target.probs[token] if token < len(target.probs) else 0.0
    epsilon, delta = exact(rule.epsilon), exact(rule.delta)
    spread, slack = entropy(target.probs), target.slack
    doubt = TIE * (1 + spread)  # of the entropy; mass that moves takes its own along
    if slack > 0:
        doubt += slack * (1 + abs(np.log(slack)) + np.log(len(target.probs)))
    low, threshold, high = (min(epsilon, delta * np.exp(s * doubt - spread)) for s in (-1, 0, 1))
    margin = (TIE + slack) * target_prob + TIE * threshold
    tie = min(target_prob, threshold) > 0 and low - margin <= target_prob <= high + margin
    if token < len(target.probs):
        tie |= target.in_doubt[token]
    return bool(target_prob > threshold), bool(tie)


def defers(target: Row, draft: Draft, rule: Cascade) -> tuple[bool, bool]:
    """Whether a cascade leaves the slot to the target, and if that is a tie.

    The draft's confidence is that of its likeliest column or entry, at most 1.
    """
    confidence = min(draft.probs.max(initial=0.0), 1.0)
    lead = target.probs.max() - exact(rule.alpha) - confidence
    return bool(lead > 0), bool(abs(lead) <= TIE + target.slack + draft.slack)


def decide(given: Sequence) -> Decision:
    """Accept a prefix of the draft and draw the token after it."""
    n = given.num_draft_tokens()
    bad = given.sampling.bad() or bad_uniforms(given.uniforms)
    if bad or (given.draft_logits is not None and given.draft_sampling.bad()):
        return Decision(0, PLACEHOLDER, BAD_PARAMETER, False)
    status, tie = 0 if given.draft_length in (None, n) else OUT_OF_RANGE, False
    if given.rule == "block" and not given.sampling.greedy():
        return decide_block(given, n, status)

    for i in range(n):
        target = given.target(i)
        if target is None:
            return Decision(i, PLACEHOLDER, status | NON_FINITE_TARGET, tie)
        token = given.draft_tokens[i]
        in_vocab = 0 <= token < len(target.probs)
        if not given.producible(i):
            token, draw_tie = draw_target(given, i, target)
            return Decision(i, token, status | OUT_OF_RANGE, tie or draw_tie)
        if not in_vocab:
            status |= OUT_OF_RANGE

        if given.sampling.greedy() or given.rule == "coupled":  # the draft row is not read
            choice, draw_tie = draw_target(given, i, target)
            tie |= draw_tie
            if token != choice:
                return Decision(i, choice, status, tie)
            continue
        if isinstance(given.rule, Typical):  # nor here
            accepted, near = is_typical(target, token, given.rule)
            tie |= near
            if not accepted:
                token, draw_tie = draw_target(given, i, target)
                return Decision(i, token, status, tie or draw_tie)
            continue

        draft = given.draft(i)
        if draft is None:
            return Decision(i, PLACEHOLDER, status | BAD_DRAFT, tie)
        target_prob = float(target.probs[token]) if in_vocab else 0.0
        draft_prob = draft.of(token)
        if draft_prob == 0:
            status |= ZERO_DRAFT_PROB
        threshold = float(exact(given.uniforms[i])) * draft_prob
        if isinstance(given.rule, Cascade):
            is_deferred, near = defers(target, draft, given.rule)
            tie |= near
            threshold *= is_deferred
        margin = TIE * draft_prob + target.slack * target_prob + draft.slack * threshold
        tie |= 0 < min(target_prob, draft_prob) and abs(threshold - target_prob) <= margin
        tie |= in_vocab and bool(target.in_doubt[token])
        tie |= bool(draft.in_doubt[draft.ids == token].any())
        if not threshold < target_prob:
            token, draw_tie = draw(target, draft, exact(given.uniforms[-2:]))
            return Decision(i, token, status, tie or draw_tie)

    target = given.target(n)
    if target is None:
        return Decision(n, PLACEHOLDER, status | NON_FINITE_TARGET, tie)
    token, draw_tie = draw_target(given, n, target)
    return Decision(n, token, status, tie or draw_tie)


def next_weight(before: Weight, target_prob: float, draft_prob: float, error: float) -> Weight:
    """``w_i`` of block verification; ``error`` is the relative one of the two probabilities."""
    if target_prob == 0 or before.value == 0:
        return Weight(0.0, 0.0)
    if draft_prob == 0:
        return ONE
    value, error = before.value * target_prob / draft_prob, before.error + error
    return ONE if value * (1 - error) >= 1 else Weight(min(value, 1.0), error)


def accept_probs(target: Row, draft: Draft, weight: Weight) -> tuple[float, float, float]:
    """``h_i`` of block verification for ``0 < i < n``: the least, the law's, the largest."""
    left, rounding = residual(target, draft, weight)
    slack = target.slack + draft.slack
    result = []
    for sign in (-1, 0, 1):
        mass = np.maximum(left + sign * rounding, 0.0).sum()
        mass = max(mass + sign * slack * (1 + weight.value), 0.0)
        missing = 1 - min(weight.value * (1 + sign * weight.error), 1.0)
        result.append(mass / (mass + missing) if mass + missing > 0 else 1.0)
    return tuple(result)


def decide_block(given: Sequence, n: int, status: int) -> Decision:
    """``rule="block"``: all rows of the draft are read, then the longest prefix that passes."""
    targets, drafts, weights, tie = [], [], [ONE], False
    for i in range(n + 1):
        target = given.target(i)
        if target is None:
            return Decision(0, PLACEHOLDER, status | NON_FINITE_TARGET, tie)
        targets.append(target)
        if i == n:
            break
        token = given.draft_tokens[i]
        if not given.producible(i):
            status, n = status | OUT_OF_RANGE, i  # the draft ends here
            break
        in_vocab = token < len(target.probs)
        if not in_vocab:
            status |= OUT_OF_RANGE
        draft = given.draft(i)
        if draft is None:
            return Decision(0, PLACEHOLDER, status | BAD_DRAFT, tie)
        drafts.append(draft)
        target_prob = float(target.probs[token]) if in_vocab else 0.0
        draft_prob = draft.of(token)
        if draft_prob == 0:
            status |= ZERO_DRAFT_PROB
        tie |= in_vocab and bool(target.in_doubt[token])
        tie |= bool(draft.in_doubt[draft.ids == token].any())
        error = 2 * PROBABILITY + target.slack + draft.slack
        weights.append(next_weight(weights[-1], target_prob, draft_prob, error))

    pair = exact(given.uniforms[-2:])
    for i in range(n, 0, -1):
        weight = weights[i]
        if i == n:
            low, h, high = (weight.value * (1 + sign * weight.error) for sign in (-1, 0, 1))
        else:
            low, h, high = accept_probs(targets[i], drafts[i], weight)
        coin = float(exact(given.uniforms[i - 1]))
        tie |= low < 1 and high > 0 and low - TIE <= coin <= high + TIE
        if coin < h:
            draft, weight = (None, ONE) if i == n else (drafts[i], weight)
            token, draw_tie = draw(targets[i], draft, pair, weight)
            return Decision(i, token, status, bool(tie or draw_tie))
    token, draw_tie = draw(targets[0], drafts[0] if n else None, pair)
    return Decision(0, token, status, bool(tie or draw_tie))


def slot_stats(given: Sequence, i: int) -> tuple[list[float], bool]:
    """Statistics of slot ``i``, NaN where they need a bad row; and whether they hang on a tie."""
    target, draft = given.target(i), given.draft(i)
    token, doubtful = given.draft_tokens[i], False
    accept_prob = overlap = target_entropy = draft_entropy = np.nan
    if target is not None:
        in_vocab = token < len(target.probs)
        target_entropy = entropy(target.probs)
        doubtful |= target.slack > 0 or bool(in_vocab and target.in_doubt[token])
    if draft is not None:
        draft_entropy = entropy(draft.by_id())
        doubtful |= draft.slack > 0 or bool(draft.in_doubt[draft.ids == token].any())
    if target is not None and draft is not None:
        target_prob = float(target.probs[token]) if in_vocab else 0.0
        draft_prob = draft.of(token)
        accept_prob = min(1.0, target_prob / draft_prob) if draft_prob else float(target_prob > 0)
        overlap = float(np.minimum(target.probs, draft.over(len(target.probs))).sum())
    return [accept_prob, overlap, target_entropy, draft_entropy], doubtful


def verify_draft(
    target_logits: np.ndarray,
    draft_tokens: np.ndarray,
    *,
    draft_logits: np.ndarray | None = None,
    draft_ids: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_vocab: np.ndarray | None = None,
    draft_lengths: np.ndarray | None = None,
    draft_stats: np.ndarray | None = None,
    sampling: Sampling = DEFAULT,
    draft_sampling: Sampling | None = None,
    rule: Rule = "token",
    uniforms: np.ndarray | None = None,
    keys: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    token_bitmask: np.ndarray | None = None,
    logprobs: str | None = None,
    stats: bool = False,
) -> Verified:
    """A batch: shapes as the operation's. ``keys`` and ``positions`` for the coupled rule only."""
    B, K = target_logits.shape[0], target_logits.shape[1] - 1
    tokens = np.full((B, K + 1), PLACEHOLDER, np.int32)
    num_accepted, status = np.zeros(B, np.int32), np.zeros(B, np.uint32)
    logs = np.full((B, K + 1), np.nan)
    statistics = Stats(*(np.full((B, K), np.nan) for _ in Stats._fields))
    ties, doubtful = np.zeros(B, bool), np.zeros((B, K + 1), bool)

    def of_sequence(values: np.ndarray | None, b: int) -> np.ndarray | None:
        return None if values is None else np.asarray(values)[b]

    for b in range(B):
        given = Sequence(
            target_logits[b],
            [int(token) for token in draft_tokens[b]],
            of_sequence(draft_logits, b),
            of_sequence(draft_ids, b),
            of_sequence(draft_probs, b),
            draft_vocab,
            None if draft_lengths is None else int(draft_lengths[b]),
            of_sequence(draft_stats, b),
            sampling.of_sequence(b),
            (draft_sampling or sampling).of_sequence(b),
            rule,
            of_sequence(uniforms, b),
            of_sequence(keys, b),
            None if positions is None else int(positions[b]),
            of_sequence(token_bitmask, b),
        )
        accepted, next_token, status[b], ties[b] = decide(given)
        num_accepted[b] = accepted
        tokens[b, :accepted] = draft_tokens[b, :accepted]
        tokens[b, accepted] = next_token
        if status[b] & BAD_PARAMETER:
            continue

        for i in range(accepted + (next_token != PLACEHOLDER)):
            target = given.target(i)
            doubtful[b, i] = target.slack > 0
            if logprobs == "raw":
                logs[b, i] = raw_logprob(target_logits[b, i], tokens[b, i])
            elif logprobs == "filtered":
                logs[b, i] = np.log(target.probs[tokens[b, i]])
        for i in range(given.num_draft_tokens() if stats else 0):
            if not given.producible(i):  # the draft ends here
                break
            slot, hangs_on_tie = slot_stats(given, i)
            for values, value in zip(statistics, slot):
                values[b, i] = value
            doubtful[b, i] |= hangs_on_tie

    return Verified(
        tokens,
        num_accepted,
        status,
        logs if logprobs else None,
        statistics if stats else None,
        ties,
        doubtful,
    )


def sample(
    logits: np.ndarray,
    sampling: Sampling = DEFAULT,
    *,
    rule: str = "independent",
    uniforms: np.ndarray | None = None,
    keys: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    token_bitmask: np.ndarray | None = None,
    logprobs: str | None = None,
) -> Sampled:
    """A batch: shapes as the operation's. ``keys`` and ``positions`` for the coupled rule only."""
    B = len(logits)
    tokens, status = np.full(B, PLACEHOLDER, np.int32), np.zeros(B, np.uint32)
    logs, row_stats = np.full(B, np.nan), np.full((B, 4), np.nan)
    ties, doubtful = np.zeros(B, bool), np.zeros(B, bool)
    for b in range(B):
        row_sampling = sampling.of_sequence(b)
        allowed = None if token_bitmask is None else token_bitmask[b]
        row_logits = masked(exact(logits[b]), allowed)
        if row_sampling.bad() or bad_uniforms(None if uniforms is None else uniforms[b]):
            status[b] |= BAD_PARAMETER
        elif bad_logits(row_logits):
            status[b] |= NON_FINITE_TARGET
        else:
            row = distribution(row_logits, row_sampling)
            if rule == "coupled":
                position = int(positions[b])
                tokens[b], ties[b] = choose(row, row_sampling.greedy(), keys[b], position)
            else:
                tokens[b], ties[b] = draw(row, None, exact(uniforms[b]))
            row_stats[b], doubtful[b] = row.stats, row.slack > 0
            if logprobs == "raw":
                logs[b] = raw_logprob(logits[b], tokens[b])
            elif logprobs == "filtered":
                logs[b] = np.log(row.probs[tokens[b]])
    return Sampled(tokens, status, logs if logprobs else None, row_stats, ties, doubtful)

"""The law of :mod:`exactspec.ops` as named steps of plain ``mx`` operations.

:func:`verify_draft` and :func:`sample` take the arguments and give the results of the fused
operations of the same names, which they share no arithmetic with: read them to see what is
computed, or run them to check the fused ones. They never wait for a value, so they work under
``mx.compile`` and ``mx.vmap``, but they read and write the vocabulary many times over.

Speculative sampling: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2.
Block verification: Sun et al. 2403.10444, algorithm 2. Shared Gumbel noise: Daliri et al.
2408.07978. The lossy rules: Cai et al. 2401.10774; Narasimhan et al. 2405.19261.

Shapes: ``B`` sequences, ``K`` draft slots, ``V`` token ids, ``R`` rows of logits, ``S`` entries of
a draft distribution. Distributions are float32.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from typing import NamedTuple, Optional

import mlx.core as mx

from . import ops
from ._ext import (
    DRAW_BLOCK,
    LARGEST_UNIFORM,
    LEAST_TEMPERATURE,
    MAX_KEYED_DRAFTS,
    MAX_SPARSE_MASS,
    NOISE_WORDS,
    WORD_SPACING,
)
from .noise import threefry2x32
from .ops import SampleResult, Status, Stream, VerifyResult, VerifyStats
from .rules import Cascade, Rule, Typical, is_exact
from .sampling import Number, Sampling


class Rows(NamedTuple):
    """Distributions over rows of logits, after temperature and filters; NaN where a row is bad.

    Attributes:
        logits: ``[B, R, V]``, masked ids at -inf.
        probs: ``[B, R, V]``.
        stats: ``[B, R, 4]``, as ``row_stats`` of :class:`exactspec.SampleResult`.
        temperature: ``[B, 1, 1]`` or ``[1, 1, 1]``; 1 where all mass is on one id.
    """

    logits: mx.array
    probs: mx.array
    stats: mx.array
    temperature: mx.array

    def good(self) -> mx.array:
        """Bool ``[B, R]``: the row is a distribution."""
        return ~mx.any(mx.isnan(self.stats), axis=-1)


class Draft(NamedTuple):
    """Draft distributions, one per slot.

    Attributes:
        ids: int32 ``[B, K, S]``, the id of each entry, repetitions allowed, or ``None`` where entry
            ``i`` is id ``i``.
        probs: ``[B, K, S]``, the entries' probabilities.
        has_place: bool ``[B, K]``, whether the draft has an entry for the slot's token at all.
        good: bool ``[B, K]``, whether the row is a distribution.
    """

    ids: Optional[mx.array]
    probs: mx.array
    has_place: mx.array
    good: mx.array


class Prefix(NamedTuple):
    """What became of a draft.

    Attributes:
        length: int32 ``[B]``, drafts in use.
        num_accepted: int32 ``[B]``, also the row that the next token comes from.
        status: uint32 ``[B]``.
        emits: bool ``[B]``, whether there is a next token (no bad row was met).
        from_residual: bool ``[B]``, whether it comes from the residual or the target row as it is.
        weight: ``[B]``, the target's factor in the residual.
    """

    length: mx.array
    num_accepted: mx.array
    status: mx.array
    emits: mx.array
    from_residual: mx.array
    weight: mx.array


# What mx lacks


def both(*conditions: mx.array) -> mx.array:
    """Elementwise and. (Under ``mx.vmap``, ``a & b`` loses the batch if only ``b`` has one.)"""
    return reduce(mx.logical_and, conditions)


def either(*conditions: mx.array) -> mx.array:
    """Elementwise or."""
    return reduce(mx.logical_or, conditions)


# Sums: running float32 sums lose 1e-5 over a vocabulary, trees of short ones do not


def _groups(x: mx.array, size: int) -> mx.array:
    """``[..., N]`` as ``[..., ceil(N / size), size]``, filled up with zeros."""
    *lead, n = x.shape
    count = -(-n // size)
    x = mx.pad(x, [(0, 0)] * len(lead) + [(0, count * size - n)])
    return x.reshape(*lead, count, size)


def total(x: mx.array) -> mx.array:
    """Sum over the last axis."""
    while x.shape[-1] > 32:
        x = mx.sum(_groups(x, 32), axis=-1)
    return mx.sum(x, axis=-1)


def cumulative(x: mx.array) -> mx.array:
    """Inclusive cumulative sum over the last axis."""
    n = x.shape[-1]
    if n <= 32:
        return mx.cumsum(x, axis=-1)
    inner = mx.cumsum(_groups(x, 32), axis=-1)
    before = _shifted(cumulative(inner[..., -1]))
    return mx.flatten(inner + before[..., None], -2)[..., :n]


def _shifted(x: mx.array) -> mx.array:
    """``[..., N]`` moved one to the right: 0, then all but the last."""
    return mx.concatenate([mx.zeros_like(x[..., :1]), x[..., :-1]], axis=-1)


# From logits to a distribution


def _parameter(value: Number, dtype: mx.Dtype = mx.float32) -> mx.array:
    """A number or ``[B]`` as an array that broadcasts against ``[B, R, V]``."""
    if not isinstance(value, mx.array):
        is_integer = dtype == mx.int32
        value = mx.array(max(min(int(value), 2**31 - 1), -(2**31)) if is_integer else float(value))
    return value.astype(dtype).reshape(-1, 1, 1)


def _is(value: Number, *numbers: float) -> bool:
    """Whether the value is one of these, known when the graph is built."""
    return not isinstance(value, mx.array) and value in numbers


def _has_filters(sampling: Sampling) -> bool:
    top_k = isinstance(sampling.top_k, mx.array) or sampling.top_k > 0
    return top_k or not (_is(sampling.top_p, 0, 1) and _is(sampling.min_p, 0))


def good_parameters(sampling: Sampling) -> mx.array:
    """Bool ``[B]`` or ``[1]``: no bad value in a parameter array."""
    temperature, top_p, min_p = (_parameter(sampling[i])[:, 0, 0] for i in (0, 2, 3))
    usable = both(temperature >= 0, temperature < mx.inf)  # false for NaN, as are the others
    return both(usable, top_p >= 0, top_p <= 1, min_p >= 0, min_p <= 1)


def good_noise(uniforms: Optional[mx.array]) -> mx.array:
    """Bool ``[B]`` or ``[1]``: all uniforms ``[B, N]`` are in [0, 1), used or not."""
    if uniforms is None:
        return mx.array([True])
    return mx.all(both(uniforms >= 0, uniforms < 1), axis=-1)  # false for NaN


def is_greedy(sampling: Sampling) -> mx.array:
    """Bool ``[B, 1, 1]`` or ``[1, 1, 1]``: temperature 0, or so small that it counts as 0."""
    return _parameter(sampling.temperature) < LEAST_TEMPERATURE


def tempering(sampling: Sampling) -> mx.array:
    """What logits are divided by, shape as :func:`is_greedy`; a greedy row keeps one id anyway."""
    return mx.where(is_greedy(sampling), 1.0, _parameter(sampling.temperature))


def masked(logits: mx.array, token_bitmask: Optional[mx.array]) -> mx.array:
    """Logits ``[B, R, V]`` in float32, ids whose bit of ``[B, R, ceil(V / 32)]`` is 0 at -inf."""
    logits = logits.astype(mx.float32)
    if token_bitmask is None:
        return logits
    size = logits.shape[-1]
    words = mx.repeat(token_bitmask.astype(mx.int32), 32, axis=-1)[..., :size]
    # Under mx.vmap, bitwise operators read past the end of an operand that is not mapped.
    place = mx.arange(size) % 32 + 0 * words
    return mx.where(mx.right_shift(words, place) & 1, logits, -mx.inf)


def weights(
    logits: mx.array, top: mx.array, temperature: mx.array, cutoff: Optional[tuple]
) -> mx.array:
    """Unnormalised ``[B, R, V]``. ``cutoff``: logit and id of the last one kept; None: all are.

    The maximum is subtracted first and the temperature divides, so that 1e-12 is as safe as 1.
    """
    w = mx.exp((logits - top) / temperature)
    if cutoff is None:
        return w
    logit, cutoff_id = cutoff
    ids = mx.arange(logits.shape[-1])
    kept = either(logits > logit, both(logits == logit, ids <= cutoff_id))
    return mx.where(kept, w, 0.0)


def num_kept(descending: mx.array, sampling: Sampling) -> mx.array:
    """How many ids the filters keep, int32 ``[B, R, 1]``, of logits in descending order.

    Every filter keeps a prefix of that order, so together they keep the shortest one.
    """
    size = descending.shape[-1]
    top_k = _parameter(sampling.top_k, mx.int32)
    top_p, min_p = _parameter(sampling.top_p), _parameter(sampling.min_p)
    temperature = tempering(sampling)
    if sampling.order in ("temperature_last", "sequential_untempered"):
        temperature = mx.array(1.0)
    w = mx.exp((descending - descending[..., :1]) / temperature)

    kept = mx.where(both(top_k > 0, top_k < size), top_k, size)
    kept = mx.broadcast_to(kept, (*descending.shape[:-1], 1))
    heavy = mx.maximum(mx.sum(w >= min_p, axis=-1, keepdims=True), 1)
    within_min_p = mx.where(min_p > 0, mx.minimum(kept, heavy), kept)

    mass = cumulative(w)
    measured_on = mass[..., -1:]
    if sampling.order in ("sequential", "sequential_untempered"):
        measured_on = mx.take_along_axis(mass, kept - 1, axis=-1)
    elif sampling.order == "min_p_first":
        measured_on = mx.take_along_axis(mass, within_min_p - 1, axis=-1)
    nucleus = mx.maximum(mx.sum(_shifted(mass) < top_p * measured_on, axis=-1, keepdims=True), 1)
    nucleus = mx.where(both(top_p > 0, top_p < 1), nucleus, size)
    return mx.minimum(within_min_p, nucleus).astype(mx.int32)


def find_cutoff(logits: mx.array, sampling: Sampling) -> Optional[tuple]:
    """Logit and id ``[B, R, 1]`` of the last one kept of "logit descending, then id ascending".

    ``None`` where all are kept, known when the graph is built. Equal logits need no stable sort:
    the cutoff's id is found by counting them from the left.
    """
    if _has_filters(sampling):
        descending = -mx.sort(-logits, axis=-1)
        kept = num_kept(descending, sampling)
        logit = mx.take_along_axis(descending, kept - 1, axis=-1)
        of_equal = kept - mx.sum(logits > logit, axis=-1, keepdims=True)
        counted = mx.cumsum((logits == logit).astype(mx.int32), axis=-1)
        cutoff_id = mx.argmax(counted >= of_equal, axis=-1, keepdims=True)
    elif isinstance(sampling.temperature, mx.array) or sampling.temperature < LEAST_TEMPERATURE:
        logit, cutoff_id = mx.array(-mx.inf), mx.array(logits.shape[-1] - 1)
    else:
        return None
    greedy = is_greedy(sampling)
    top, best = mx.max(logits, axis=-1, keepdims=True), mx.argmax(logits, axis=-1, keepdims=True)
    return mx.where(greedy, top, logit), mx.where(greedy, best, cutoff_id).astype(mx.int32)


def distribution(logits: mx.array, sampling: Sampling) -> Rows:
    """The distributions of rows of logits ``[B, R, V]`` float32."""
    top = mx.max(logits, axis=-1, keepdims=True)
    good = both(mx.all(logits < mx.inf, axis=-1, keepdims=True), top > -mx.inf)
    temperature = tempering(sampling)
    cutoff = find_cutoff(logits, sampling)
    w = weights(logits, top, temperature, cutoff)
    log_norm = mx.where(good, mx.log(total(w)[..., None]), mx.nan)
    logit, cutoff_id = cutoff or (mx.array(-mx.inf), mx.array(logits.shape[-1] - 1))
    stats = mx.concatenate(
        [
            mx.broadcast_to(x.astype(mx.float32), top.shape)
            for x in (top, log_norm, logit, cutoff_id)
        ],
        axis=-1,
    )
    return Rows(logits, w * mx.exp(-log_norm), mx.where(good, stats, mx.nan), temperature)


def distribution_of_stats(logits: mx.array, stats: mx.array, sampling: Sampling) -> Rows:
    """The same where ``row_stats [B, R, 4]`` are known: nothing has to be summed or sorted."""
    top, log_norm, *cutoff = (stats[..., i : i + 1] for i in range(4))
    temperature = tempering(sampling)
    w = weights(logits, top, temperature, tuple(cutoff))
    return Rows(logits, w * mx.exp(-log_norm), stats, temperature)


def target_distribution(
    logits: mx.array, sampling: Sampling, token_bitmask: Optional[mx.array]
) -> Rows:
    """Target rows ``[B, R, V]``: the mask comes before everything else."""
    return distribution(masked(logits, token_bitmask), sampling)


# The draft, whatever its kind


def dense_draft(
    tokens: mx.array,
    logits: mx.array,
    vocab: Optional[mx.array],
    stats: Optional[mx.array],
    sampling: Sampling,
) -> Draft:
    """A draft of logits ``[B, K, Vd]``; ``vocab [Vd]`` says which id each column stands for."""
    logits = logits.astype(mx.float32)
    if stats is None:
        rows = distribution(logits, sampling)
    else:
        rows = distribution_of_stats(logits, stats, sampling)
    if vocab is None:
        has_place = both(tokens >= 0, tokens < logits.shape[-1])
        return Draft(None, rows.probs, has_place, rows.good())
    ids = mx.broadcast_to(vocab.astype(mx.int32), logits.shape)
    has_place = both(tokens >= 0, mx.any(ids == tokens[..., None], axis=-1))
    return Draft(ids, rows.probs, has_place, rows.good())


def sparse_draft(tokens: mx.array, ids: mx.array, probs: mx.array, vocab_size: int) -> Draft:
    """A draft of final probabilities ``[B, K, S]``; negative ids are padding."""
    ids = ids.astype(mx.int32)
    probs = mx.where(ids >= 0, probs, 0.0)
    good = both(mx.all(probs >= 0, axis=-1), total(probs) <= MAX_SPARSE_MASS)  # false for NaN
    listed = mx.any(ids == tokens[..., None], axis=-1)
    has_place = both(tokens >= 0, either(tokens < vocab_size, listed))
    return Draft(ids, probs, has_place, good)


def one_hot_draft(tokens: mx.array, vocab_size: int) -> Draft:
    """All mass on the draft token."""
    has_place = both(tokens >= 0, tokens < vocab_size)
    ids = tokens[..., None]
    return Draft(ids, mx.ones(ids.shape), has_place, mx.ones(tokens.shape, mx.bool_))


def prob_of(ids: Optional[mx.array], probs: mx.array, tokens: mx.array) -> mx.array:
    """Probability ``[B, K]`` of tokens ``[B, K]``: of all entries with that id; 0 without one."""
    if ids is not None:
        return mx.sum(mx.where(ids == tokens[..., None], probs, 0.0), axis=-1)
    last = probs.shape[-1] - 1
    at_token = mx.take_along_axis(probs, mx.clip(tokens, 0, last)[..., None], axis=-1)[..., 0]
    return mx.where(both(tokens >= 0, tokens <= last), at_token, 0.0)


def over_vocabulary(ids: Optional[mx.array], probs: mx.array, size: int) -> mx.array:
    """Entries ``[..., S]`` as probabilities of ids ``[..., size]``; other ids' mass is left out."""
    *lead, entries = probs.shape
    if ids is None:
        fill = [(0, 0)] * len(lead) + [(0, max(size - entries, 0))]
        return mx.pad(probs[..., :size], fill)
    if probs.size == 0:  # no slots or no entries, which a scatter refuses
        return mx.zeros((*lead, size))
    ids = mx.where(both(ids >= 0, ids < size), ids, size).reshape(-1, entries)
    rows = mx.arange(ids.shape[0])[:, None]
    dense = mx.zeros((ids.shape[0], size + 1)).at[rows, ids].add(probs.reshape(-1, entries))
    return dense[:, :size].reshape(*lead, size)


# Verification


def num_draft_tokens(
    tokens: mx.array, lengths: Optional[mx.array]
) -> tuple[mx.array, Optional[mx.array]]:
    """Drafts in use, int32 ``[B]``, and whether a given length was out of range, bool ``[B]``."""
    if lengths is None:
        is_used = (tokens != ops.PLACEHOLDER_TOKEN).astype(mx.int32)
        length = mx.sum(mx.cumprod(is_used, axis=-1), axis=-1)
        return length, mx.zeros_like(length).astype(mx.bool_)
    length = mx.clip(lengths, 0, tokens.shape[-1])
    return length, lengths != length


def accepted_slots(
    rule: Rule, target: Rows, draft: Draft, tokens: mx.array, coins: Optional[mx.array]
) -> mx.array:
    """Bool ``[B, K]``: the rule accepts the slot's token, given that the earlier ones were.

    Of a temperature above 0, and rows that are good. Under ``"block"`` the last slots decide, so
    that none is turned down here. Not for ``"coupled"``.
    """
    K = tokens.shape[-1]
    target_prob = prob_of(None, target.probs[:, :K], tokens)
    if rule == "block":
        return mx.ones(tokens.shape, mx.bool_)
    if isinstance(rule, Typical):
        plausible = rule.delta * mx.exp(-entropy(target.probs[:, :K]))
        return target_prob > mx.minimum(rule.epsilon, plausible)
    thresholds = coins * prob_of(draft.ids, draft.probs, tokens)
    if isinstance(rule, Cascade):
        confidence = mx.max(mx.pad(draft.probs, [(0, 0), (0, 0), (0, 1)]), axis=-1)
        target_confidence = mx.max(target.probs[:, :K], axis=-1)
        defers = mx.minimum(confidence, 1.0) < target_confidence - rule.alpha
        thresholds = mx.where(defers, thresholds, 0.0)
    # Strictly less: a token the target cannot produce stays out also when the coin is 0.
    return thresholds < target_prob


def accept_prefix(
    target: Rows,
    draft: Draft,
    tokens: mx.array,
    lengths: Optional[mx.array],
    accepted: mx.array,
    reads_draft: mx.array,
) -> Prefix:
    """Go through the slots ``[B, K]`` one after the other, until one does not pass.

    ``reads_draft`` ``[B, 1]``: the rule depends on the draft's rows, so that they must be good.
    """
    K, vocab_size = tokens.shape[-1], target.logits.shape[-1]
    length, clamped = num_draft_tokens(tokens, lengths)
    place = mx.arange(K)
    target_good = target.good()
    judged = both(place < length[:, None], target_good[:, :K])
    passed = both(judged, draft.has_place, either(~reads_draft, draft.good), accepted)
    num_accepted = mx.sum(mx.cumprod(passed.astype(mx.int32), axis=-1), axis=-1)

    reached = both(judged, place <= num_accepted[:, None])
    draft_read = both(reached, draft.has_place, reads_draft)
    bad_target = ~mx.take_along_axis(target_good, num_accepted[:, None], axis=-1)
    bad_draft = both(draft_read, ~draft.good)
    off_range = both(reached, either(~draft.has_place, tokens >= vocab_size))
    off_range = mx.concatenate([off_range, clamped[:, None]], axis=-1)
    draft_prob = prob_of(draft.ids, draft.probs, tokens)
    zero_draft_prob = both(draft_read, draft.good, draft_prob == 0)
    status = (
        _flag(bad_target, Status.NON_FINITE_TARGET)
        + _flag(bad_draft, Status.BAD_DRAFT)
        + _flag(off_range, Status.OUT_OF_RANGE)
        + _flag(zero_draft_prob, Status.ZERO_DRAFT_PROB)
    )
    emits = ~mx.any(mx.concatenate([bad_target, bad_draft], axis=-1), axis=-1)
    from_residual = mx.any(both(draft_read, draft.good, ~accepted), axis=-1)
    weight = mx.ones(num_accepted.shape)
    return Prefix(length, num_accepted, status, emits, from_residual, weight)


def block_weights(target_prob: mx.array, draft_prob: mx.array) -> mx.array:
    """``[B, K + 1]`` of probabilities ``[B, K]``: ``w_i = min(w_{i-1} * target / draft, 1)``."""
    weights = [mx.ones(target_prob.shape[:1])]
    for i in range(target_prob.shape[-1]):
        before, target, draft = weights[-1], target_prob[:, i], draft_prob[:, i]
        ratio = before * target / mx.where(draft > 0, draft, 1.0)
        ratio = mx.where(draft > 0, ratio, (before > 0).astype(mx.float32))
        weights.append(mx.where(target > 0, mx.minimum(ratio, 1.0), 0.0))
    return mx.stack(weights, axis=-1)


def accept_block(
    target: Rows, draft: Draft, tokens: mx.array, read: Prefix, coins: mx.array, greedy: mx.array
) -> Prefix:
    """Of the slots that could be ``read``, accept up to the last one whose coin passes.

    ``greedy`` ``[B]``: temperature 0, where the prefix is the one that was read.
    """
    K, rows = tokens.shape[-1], target.probs[:, : tokens.shape[-1]]
    if K == 0:
        return read
    weights = block_weights(prob_of(None, rows, tokens), prob_of(draft.ids, draft.probs, tokens))
    draft_rows = over_vocabulary(draft.ids, draft.probs, rows.shape[-1])
    mass = total(mx.maximum(weights[:, :K, None] * rows - draft_rows, 0.0))
    missing = 1 - weights[:, :K]
    inside = mx.where(mass + missing > 0, mass / (mass + missing), 1.0)

    end = read.num_accepted[:, None]
    length = mx.arange(1, K + 1)
    accept_prob = mx.where(length == end, weights[:, 1:], mx.roll(inside, -1, axis=-1))
    passed = both(length <= end, coins < accept_prob, read.emits[:, None])
    longest = mx.max(mx.where(passed, length, 0), axis=-1)
    num_accepted = mx.where(greedy, read.num_accepted, longest)
    weight = mx.take_along_axis(weights, num_accepted[:, None], axis=-1)[:, 0]
    return read._replace(
        num_accepted=num_accepted,
        from_residual=num_accepted < mx.where(greedy, 0, read.num_accepted),
        weight=weight,
    )


def _flag(condition: mx.array, bit: Status) -> mx.array:
    """The bit, uint32 ``[B]``, where the condition ``[B, ...]`` holds anywhere."""
    return mx.where(mx.any(condition, axis=-1), int(bit), 0).astype(mx.uint32)


def residual(target_row: mx.array, draft_row: mx.array) -> mx.array:
    """``max(target - draft, 0)`` ``[B, V]``, unnormalised; the target where no mass is left.

    Only rounding leaves none: target and draft agree then.
    """
    left = mx.maximum(target_row - draft_row, 0.0)
    return mx.where(total(left)[:, None] > 0, left, target_row)


def next_weights(target: Rows, draft: Draft, prefix: Prefix) -> mx.array:
    """The law of the token after the prefix, unnormalised ``[B, V]``."""
    row = prefix.num_accepted[:, None, None]
    target_row = mx.take_along_axis(target.probs, row, axis=1)[:, 0]
    K = draft.probs.shape[1]
    if K == 0:
        return target_row
    slot = mx.minimum(row, K - 1)
    probs = mx.take_along_axis(draft.probs, slot, axis=1)[:, 0]
    ids = None if draft.ids is None else mx.take_along_axis(draft.ids, slot, axis=1)[:, 0]
    draft_row = over_vocabulary(ids, probs, target_row.shape[-1])
    left = residual(prefix.weight[:, None] * target_row, draft_row)
    return mx.where(prefix.from_residual[:, None], left, target_row)


def pick(mass: mx.array, uniform: mx.array) -> mx.array:
    """The first index of ``[B, N]`` whose cumulative mass is ``> uniform * total``, int32 ``[B]``.

    The last index of positive mass if rounding leaves none; one without mass is never picked.
    """
    sums = cumulative(mass)
    positive = mass > 0
    past = both(positive, sums > uniform[:, None] * sums[:, -1:])
    first = mx.argmax(past, axis=-1)
    last = mass.shape[-1] - 1 - mx.argmax(positive[:, ::-1], axis=-1).astype(mx.int32)
    return mx.where(mx.any(past, axis=-1), first.astype(mx.int32), last)


def draw_token(law: mx.array, pair: mx.array) -> mx.array:
    """An id ``[B]`` drawn from weights ``[B, V]`` by uniforms ``[B, 2]``: two-level inverse CDF.

    The first uniform chooses a block and the second an id in it, so that a token's probability may
    be far below a uniform's resolution of 2**-24.
    """
    blocks = _groups(law, min(DRAW_BLOCK, law.shape[-1]))
    block = pick(total(blocks), pair[:, 0])
    inside = mx.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * DRAW_BLOCK + pick(inside, pair[:, 1])


def gumbel(words: mx.array) -> mx.array:
    """Standard Gumbel noise of uint32 words. The cap keeps it finite."""
    x = mx.minimum((words.astype(mx.float32) + 0.5) * WORD_SPACING, LARGEST_UNIFORM)
    return -mx.log(-mx.log1p(-x))


def coupled_choices(target: Rows, keys: mx.array, positions: mx.array) -> mx.array:
    """The target's choice in every row, int32 ``[B, R]``; row ``r`` is at ``positions [B] + r``.

    The noise is a function of key, position and id, so that it is the same wherever it is used.
    """
    rows, size = target.probs.shape[-2:]
    place = positions.astype(mx.uint32)[:, None, None] + mx.arange(rows, dtype=mx.uint32)[:, None]
    pairs = mx.arange((size + 1) // 2, dtype=mx.uint32)  # ids 2i and 2i + 1 share a call
    key = keys[:, :1, None], keys[:, 1:, None]
    words = mx.stack(threefry2x32(key, place, pairs), axis=-1)
    noise = gumbel(mx.flatten(words, -2)[..., :size])
    scores = (target.logits - target.stats[..., :1]) / target.temperature + noise
    return mx.argmax(mx.where(target.probs > 0, scores, -mx.inf), axis=-1).astype(mx.int32)


def write_tokens(tokens: mx.array, num_accepted: mx.array, next_token: mx.array) -> mx.array:
    """``[B, K + 1]``: the accepted drafts, the next token, then placeholders."""
    place = mx.arange(tokens.shape[-1] + 1)
    drafts = mx.pad(tokens, [(0, 0), (0, 1)])
    end = num_accepted[:, None]
    after = mx.where(place == end, next_token[:, None], ops.PLACEHOLDER_TOKEN)
    return mx.where(place < end, drafts, after)


# What a result carries beside the tokens


def token_logprobs(
    kind: Optional[str], logits: mx.array, target: Rows, tokens: mx.array
) -> Optional[mx.array]:
    """Log-probabilities ``[B, R]`` of tokens ``[B, R]``; NaN at placeholders.

    ``"raw"``: of the logits ``[B, R, V]`` as given; ``"filtered"``: of the target.
    """
    if kind is None:
        return None
    rows = target if kind == "filtered" else distribution(masked(logits, None), Sampling())
    at_token = mx.maximum(tokens, 0)[..., None]
    logit = mx.take_along_axis(rows.logits, at_token, axis=-1)
    log_norm = rows.stats[..., 1:2]
    result = ((logit - rows.stats[..., :1]) / rows.temperature - log_norm)[..., 0]
    return mx.where(tokens == ops.PLACEHOLDER_TOKEN, mx.nan, result)


def entropy(probs: mx.array) -> mx.array:
    """In nats, over the last axis."""
    return total(mx.where(probs > 0, -probs * mx.log(probs), 0.0))


def merged(ids: Optional[mx.array], probs: mx.array) -> mx.array:
    """Probabilities ``[B, K, S]`` with those of equal ids added up, in some order."""
    if ids is None:
        return probs
    order = mx.argsort(ids, axis=-1)
    ids, probs = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(probs, order, axis=-1)
    is_new = (ids[..., 1:] != ids[..., :-1]).astype(mx.int32)
    rank = mx.concatenate([mx.zeros_like(ids[..., :1]), mx.cumsum(is_new, axis=-1)], axis=-1)
    return over_vocabulary(rank, probs, probs.shape[-1])


def draft_statistics(target: Rows, draft: Draft, tokens: mx.array, used: mx.array) -> VerifyStats:
    """Of the slots ``[B, K]`` in use, as far as their rows are good; else NaN."""
    K = tokens.shape[-1]
    rows = target.probs[:, :K]
    target_prob = prob_of(None, rows, tokens)
    draft_prob = prob_of(draft.ids, draft.probs, tokens)
    ratio = mx.minimum(target_prob / mx.where(draft_prob > 0, draft_prob, 1.0), 1.0)
    accept_prob = mx.where(draft_prob > 0, ratio, (target_prob > 0).astype(mx.float32))
    overlap = total(mx.minimum(rows, over_vocabulary(draft.ids, draft.probs, rows.shape[-1])))
    has_target, has_draft = both(used, target.good()[:, :K]), both(used, draft.good)
    return VerifyStats(
        mx.where(both(has_target, has_draft), accept_prob, mx.nan),
        mx.where(both(has_target, has_draft), overlap, mx.nan),
        mx.where(has_target, entropy(rows), mx.nan),
        mx.where(has_draft, entropy(merged(draft.ids, draft.probs)), mx.nan),
    )


# The operations


def noise(
    uniforms: Optional[mx.array], keys: Optional[mx.array], num_coins: int
) -> tuple[mx.array, mx.array]:
    """Coins ``[B, num_coins]`` and the draw's pair ``[B, 2]``.

    A key stands for ``NOISE_WORDS`` uniforms whatever the draft's length, so that padding changes
    nothing.
    """
    if uniforms is not None:
        return uniforms[:, :num_coins], uniforms[:, num_coins:]
    words = mx.vmap(lambda key: mx.random.uniform(shape=(NOISE_WORDS,), key=key))(keys)
    return words[:, :num_coins], words[:, MAX_KEYED_DRAFTS:]


def verify_draft(
    target_logits: mx.array,
    draft_tokens: mx.array,
    *,
    draft_logits: Optional[mx.array] = None,
    draft_ids: Optional[mx.array] = None,
    draft_probs: Optional[mx.array] = None,
    draft_vocab: Optional[mx.array] = None,
    draft_lengths: Optional[mx.array] = None,
    draft_stats: Optional[mx.array] = None,
    sampling: Sampling = Sampling(),
    draft_sampling: Optional[Sampling] = None,
    rule: Rule = "token",
    uniforms: Optional[mx.array] = None,
    keys: Optional[mx.array] = None,
    positions: Optional[mx.array] = None,
    token_bitmask: Optional[mx.array] = None,
    logprobs: Optional[str] = None,
    stats: bool = False,
    stream: Stream = None,
) -> VerifyResult:
    """:func:`exactspec.verify_draft` from plain ``mx`` operations; same arguments and results."""
    ops.check_arrays("verify_draft", target_logits=target_logits)
    keys = ops.resolve_noise("verify_draft", rule, target_logits.shape[:-2], uniforms, keys)
    # Arrays are lazy: building the fused operation checks the arguments and evaluates nothing.
    fused = ops.verify_draft(
        target_logits,
        draft_tokens,
        draft_logits=draft_logits,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        draft_vocab=draft_vocab,
        draft_lengths=draft_lengths,
        draft_stats=draft_stats,
        sampling=sampling,
        draft_sampling=draft_sampling,
        rule=rule,
        uniforms=uniforms,
        keys=keys,
        positions=positions,
        token_bitmask=token_bitmask,
        logprobs=logprobs,
        stats=stats,
        stream=stream,
    )
    if target_logits.size == 0:  # no sequences, and reductions of nothing raise
        return fused
    has_batch = target_logits.ndim == 3

    def batched(x: Optional[mx.array]) -> Optional[mx.array]:
        return x if x is None or has_batch else x[None]

    with nullcontext() if stream is None else mx.stream(stream):
        logits, tokens = batched(target_logits), batched(draft_tokens).astype(mx.int32)
        K, vocab_size = tokens.shape[-1], logits.shape[-1]
        valid = both(good_parameters(sampling), good_noise(batched(uniforms)))
        target = target_distribution(logits, sampling, batched(token_bitmask))
        if draft_logits is not None:
            draft_sampling = draft_sampling or sampling
            valid = both(valid, good_parameters(draft_sampling))
        if K == 0 or (draft_logits is None and draft_ids is None):
            draft = one_hot_draft(tokens, vocab_size)
        elif draft_logits is not None:
            draft = dense_draft(
                tokens, batched(draft_logits), draft_vocab, batched(draft_stats), draft_sampling
            )
        else:
            draft = sparse_draft(tokens, batched(draft_ids), batched(draft_probs), vocab_size)

        greedy = is_greedy(sampling)[:, :, 0]
        if rule == "coupled":
            choices = coupled_choices(target, batched(keys), batched(positions))
            accepted, reads_draft = tokens == choices[:, :K], mx.array([[False]])
        else:
            coins, pair = noise(batched(uniforms), batched(keys), K)
            accepted = accepted_slots(rule, target, draft, tokens, coins)
            is_best = prob_of(None, target.probs[:, :K], tokens) > 0  # no coin is needed
            accepted = mx.where(greedy, is_best, accepted)
            reads_draft = both(~greedy, mx.array(not isinstance(rule, Typical)))
        prefix = accept_prefix(target, draft, tokens, batched(draft_lengths), accepted, reads_draft)
        if rule == "block":
            prefix = accept_block(target, draft, tokens, prefix, coins, greedy[:, 0])
        if rule == "coupled":
            drawn = mx.take_along_axis(choices, prefix.num_accepted[:, None], axis=-1)[:, 0]
        else:
            drawn = draw_token(next_weights(target, draft, prefix), pair)

        next_token = mx.where(both(valid, prefix.emits), drawn, ops.PLACEHOLDER_TOKEN)
        num_accepted = mx.where(valid, prefix.num_accepted, 0)
        status = mx.where(valid, prefix.status, int(Status.BAD_PARAMETER)).astype(mx.uint32)
        emitted = write_tokens(tokens, num_accepted, next_token)

        results = [emitted, num_accepted, status]
        results.append(token_logprobs(logprobs, logits, target, emitted))
        if stats:
            in_draft = both(mx.arange(K) < prefix.length[:, None], draft.has_place, valid[:, None])
            used = mx.cumprod(in_draft.astype(mx.int32), axis=-1).astype(mx.bool_)
            results.extend(draft_statistics(target, draft, tokens, used))
        if not has_batch:
            results = [x if x is None else x[0] for x in results]
    return VerifyResult(*results[:4], VerifyStats(*results[4:]) if stats else None, is_exact(rule))


def sample(
    logits: mx.array,
    sampling: Sampling = Sampling(),
    *,
    rule: str = "independent",
    uniforms: Optional[mx.array] = None,
    keys: Optional[mx.array] = None,
    positions: Optional[mx.array] = None,
    token_bitmask: Optional[mx.array] = None,
    logprobs: Optional[str] = None,
    stream: Stream = None,
) -> SampleResult:
    """:func:`exactspec.sample` from plain ``mx`` operations: same arguments, results, errors."""
    ops.check_arrays("sample", logits=logits)
    keys = ops.resolve_noise("sample", rule, logits.shape[:-1], uniforms, keys)
    # Arrays are lazy: building the fused operation checks the arguments and evaluates nothing.
    fused = ops.sample(
        logits,
        sampling,
        rule=rule,
        uniforms=uniforms,
        keys=keys,
        positions=positions,
        token_bitmask=token_bitmask,
        logprobs=logprobs,
        stream=stream,
    )
    if logits.size == 0:
        return fused
    has_batch = logits.ndim == 2

    def as_rows(x: Optional[mx.array]) -> Optional[mx.array]:
        """``[B, 1, ...]``."""
        return x if x is None else mx.expand_dims(x, 1 if has_batch else (0, 1))

    with nullcontext() if stream is None else mx.stream(stream):
        rows = as_rows(logits)
        target = target_distribution(rows, sampling, as_rows(token_bitmask))
        noise_rows = [x if x is None or has_batch else x[None] for x in (uniforms, keys, positions)]
        valid = both(good_parameters(sampling), good_noise(noise_rows[0]))
        good = target.good()[:, 0]
        if rule == "coupled":
            drawn = coupled_choices(target, *noise_rows[1:])[:, 0]
        else:
            _, pair = noise(*noise_rows[:2], 0)
            drawn = draw_token(target.probs[:, 0], pair)
        tokens = mx.where(both(valid, good), drawn, ops.PLACEHOLDER_TOKEN)
        status = mx.where(
            valid, _flag(~good[:, None], Status.NON_FINITE_TARGET), int(Status.BAD_PARAMETER)
        ).astype(mx.uint32)
        logs = token_logprobs(logprobs, rows, target, tokens[:, None])
        row_stats = mx.where(valid[:, None], target.stats[:, 0], mx.nan)
        results = [tokens, status, None if logs is None else logs[:, 0], row_stats]
        if not has_batch:
            results = [x if x is None else x[0] for x in results]
    return SampleResult(*results)

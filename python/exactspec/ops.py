"""The operations: verify a draft against the target, or draw a token from one row of logits."""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple, Optional, Union

import mlx.core as mx

from . import _ext
from .noise import note_draw, warn_of_shared_noise
from .rules import EXACT_RULES, Cascade, Rule, check_rule, is_exact, pack_rule
from .sampling import ORDERS, Sampling, check_sampling, is_greedy

PLACEHOLDER_TOKEN = _ext.PLACEHOLDER_TOKEN
"""Fills ``tokens`` behind the last emitted one, and marks unused draft slots."""

LOGPROBS = (None, "raw", "filtered")

REQUIRED_ARRAYS = ("logits", "target_logits", "draft_tokens", "parents")

Stream = Union[mx.Stream, mx.Device, mx.DeviceType, None]


class Status(IntFlag):
    """What went wrong in a sequence, or was noteworthy; 0 is the usual value.

    Rows are looked at in order, so a bit speaks only of rows that were reached: slot ``i`` is
    reached when all earlier drafts were accepted. Other sequences of the batch are unaffected.
    """

    NON_FINITE_TARGET = _ext.NON_FINITE_TARGET  # 1
    """A target row has NaN, +inf or no finite logit: the sequence stops there (next token -1)."""
    BAD_DRAFT = _ext.BAD_DRAFT  # 2
    """The same of a draft row, or sparse probabilities that are NaN, negative, infinite or add up
    to more than 1.001, or NaN ``draft_stats``: the sequence stops there (next token -1)."""
    OUT_OF_RANGE = _ext.OUT_OF_RANGE  # 4
    """A draft token or length is out of range; see :func:`verify_draft`."""
    ZERO_DRAFT_PROB = _ext.ZERO_DRAFT_PROB  # 8
    """A draft token has draft probability 0: accepted iff its target probability is positive."""
    BAD_PARENT = _ext.BAD_PARENT  # 16
    """A node's parent does not come before it: the tree ends there; see :func:`verify_tree`."""
    BAD_PARAMETER = _ext.BAD_PARAMETER  # 32
    """In an array: a temperature that is NaN, infinite or negative, a ``top_p`` or ``min_p`` that
    is NaN or outside [0, 1], or a uniform that is NaN or outside [0, 1), used or not: no token."""


class VerifyStats(NamedTuple):
    """Per draft slot, float32 ``[B, K]``, after temperature and filters; NaN at unused slots.

    Attributes:
        accept_prob: ``min(1, target / draft)`` at the draft token.
        overlap: ``sum_v min(target(v), draft(v))``, the acceptance rate to expect of this slot.
        target_entropy: in nats.
        draft_entropy: in nats; 0 for a one-hot draft.
    """

    accept_prob: mx.array
    overlap: mx.array
    target_entropy: mx.array
    draft_entropy: mx.array


class VerifyResult(NamedTuple):
    """What :func:`verify_draft` returns. Shapes lose ``B`` when the inputs have no batch axis.

    Attributes:
        tokens: int32 ``[B, K + 1]``: the accepted drafts, then the residual or bonus token, then
            ``PLACEHOLDER_TOKEN``.
        num_accepted: int32 ``[B]``: length of the accepted prefix.
        status: uint32 ``[B]``: bits of :class:`Status`.
        logprobs: float32 ``[B, K + 1]`` of the emitted tokens, NaN behind them; ``None`` unless
            asked for.
        stats: :class:`VerifyStats`; ``None`` unless asked for.
        exact: whether the emitted tokens follow the target's distribution.
    """

    tokens: mx.array
    num_accepted: mx.array
    status: mx.array
    logprobs: Optional[mx.array] = None
    stats: Optional[VerifyStats] = None
    exact: bool = True


class SampleResult(NamedTuple):
    """What :func:`sample` returns. Shapes lose ``B`` when the logits have no batch axis.

    Attributes:
        tokens: int32 ``[B]``; ``PLACEHOLDER_TOKEN`` where ``status`` says why.
        status: uint32 ``[B]``: bits of :class:`Status`.
        logprobs: float32 ``[B]`` or ``None``.
        row_stats: float32 ``[B, 4]``: largest logit; log of the sum of kept weights
            ``exp((logit - max) / temperature)``; cutoff logit; cutoff id. A token is kept when its
            logit is above the cutoff, or equal to it with an id up to the cutoff id. NaN for a bad
            row. Hand it to :func:`verify_draft` as ``draft_stats``.
    """

    tokens: mx.array
    status: mx.array
    logprobs: Optional[mx.array]
    row_stats: mx.array


def check_arrays(op: str, **arguments) -> None:
    """Raise ``TypeError`` unless every argument is an ``mx.array``, or ``None`` if optional."""
    for name, value in arguments.items():
        is_absent = value is None and name not in REQUIRED_ARRAYS
        if not is_absent and not isinstance(value, mx.array):
            raise TypeError(
                f"[{op}] {name}: expected mlx.core.array, got {type(value).__module__}."
                f"{type(value).__name__}"
            )


def check_stream(op: str, stream) -> None:
    """Raise ``TypeError`` unless ``stream`` is something MLX can run on."""
    if stream is not None and not isinstance(stream, (mx.Stream, mx.Device, mx.DeviceType)):
        raise TypeError(f"[{op}] stream: expected an MLX stream or device, got {stream!r}")


def check_choice(op: str, name: str, value, choices) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if not any(value is c or (isinstance(value, str) and value == c) for c in choices):
        expected = ", ".join(repr(c) for c in choices)
        raise ValueError(f"[{op}] {name}: expected one of {expected}, got {value!r}")


def resolve_noise(op: str, rule: Rule, batch_shape: tuple, uniforms, keys):
    """The ``keys`` to use: as given, or drawn from ``mx.random`` when there is no noise at all.

    Noise that is shared has to be named: under ``"coupled"`` there must be keys, and no uniforms.
    """
    if rule == "coupled":
        for name, value, wanted in (("uniforms", uniforms, False), ("keys", keys, True)):
            if (value is not None) != wanted:
                expected, got = ("an array", "None") if wanted else ("None", "an array")
                raise ValueError(
                    f"[{op}] {name}: expected {expected} with rule='coupled', got {got}"
                )
    if uniforms is not None and keys is not None:
        raise ValueError(f"[{op}] uniforms, keys: expected at most one of them, got both")
    if uniforms is None and keys is None:
        keys = mx.random.randint(0, 2**32, shape=(*batch_shape, 2), dtype=mx.uint32)
    return keys


def check_draft_sampling(op: str, draft_logits, draft_sampling, sampling: Sampling) -> Sampling:
    """The draft's parameters: the target's unless given, and only for a dense draft."""
    if draft_sampling is None:
        return sampling
    check_sampling(op, "draft_sampling", draft_sampling)
    if draft_logits is None:
        raise ValueError(
            f"[{op}] draft_sampling: expected None without draft_logits (the probabilities "
            f"of a sparse or one-hot draft are final), got {draft_sampling!r}"
        )
    return draft_sampling


def pack(sampling: Sampling) -> tuple:
    """The parameters as the extension takes them."""
    numbers = (v if isinstance(v, mx.array) else float(v) for v in sampling[:4])
    return (*numbers, ORDERS.index(sampling.order))


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
    """Accept a prefix of a draft and draw the token after it, exactly as the target would.

    Whatever the draft, the emitted tokens are distributed as if each had been sampled from the
    target. Which drafts are accepted is up to the rule:

    ``"token"`` (speculative sampling: Leviathan et al. 2211.17192, algorithm 1; Chen et al.
    2302.01318): draft token ``x`` of slot ``i`` is accepted iff ``u_i * draft_i(x) < target_i(x)``,
    strictly, so a token the target cannot produce is never accepted. At the first rejection the
    next token comes from the residual ``max(target_i - draft_i, 0)`` renormalised; after a fully
    accepted draft, from the bonus row. If the residual has no mass (rounding), the target row is
    the law.

    ``"block"`` (Sun et al. 2403.10444, algorithm 2): the slots are judged together, and the mean
    accepted length is never below the token rule's. Reads every row in use.

    ``"coupled"`` (Daliri et al. 2408.07978): every token is the target's own choice by noise that
    is a function of key, position and token id, and drafts are accepted while they are that choice.
    With the same key the text is the same whatever the drafter, or without one. Draw drafts by
    ``sample(..., rule="coupled")`` with the same keys. The draft's distribution is not read. Needs
    ``keys`` and ``positions``.

    :class:`Typical` and :class:`Cascade` are lossy: results have ``exact=False``.

    A row with temperature 0 needs no coin: drafts are accepted while they are the argmax, under
    every rule. Except under ``"block"``, rows after the first rejection are not read. Inputs are
    read in place whatever their strides, and never written to. Without a batch axis
    (``[K + 1, V]``) all shapes lose ``B``. Leave all noise out and ``mx.random`` supplies it; under
    ``mx.compile`` capture ``mx.random.state`` then, and under ``mx.vmap`` pass ``keys`` (one draw
    would serve all) and return the array fields only.

    Args:
        target_logits: ``[B, K + 1, V]`` float32, float16 or bfloat16. Row ``i`` predicts draft slot
            ``i``; the row after the last draft is the bonus row. -inf is a legal mask.
        draft_tokens: ``[B, K]`` int32 or uint32; ``-1`` marks an unused slot.
        draft_logits: ``[B, K, Vd]``, dtypes as the target's: a dense draft, tempered and filtered
            by ``draft_sampling``. ``Vd`` may differ from ``V``.
        draft_ids: ``[B, K, S]`` int32 with ``draft_probs``: a sparse draft. Negative ids are
            padding, repeated ids add up.
        draft_probs: ``[B, K, S]`` float32: final probabilities of ``draft_ids``. With neither a
            dense nor a sparse draft, the draft is one-hot (prompt lookup, a greedy draft).
        draft_vocab: ``[Vd]`` int32: target id of each column of ``draft_logits`` (default: column
            ``i`` is id ``i``). Repeated ids add up. Ascending ids save a sort per call.
        draft_lengths: ``[B]`` int32: drafts in use, ``0..K`` (default: up to the first ``-1``).
            Unless the draft is one-hot it may depend on the kept tokens only, never on a dropped
            one.
        draft_stats: ``[B, K, 4]`` float32: ``row_stats`` of :func:`sample` for the draft rows, so
            that they are not read again to be normalised.
        sampling: the target's parameters.
        draft_sampling: those of a dense draft (default: the target's).
        rule: ``"token"``, ``"block"``, ``"coupled"``, or a lossy rule.
        uniforms: ``[B, K + 2]`` float32 in [0, 1): coin ``i`` at ``i``, the draw's pair at ``K``
            and ``K + 1``, also for shorter drafts. Another value in a row, used or not, sets
            ``Status.BAD_PARAMETER``. Not with ``"coupled"``.
        keys: ``[B, 2]`` uint32, as ``mx.random.key`` gives: with
            ``r = mx.random.uniform(shape=(256,), key=keys[b])`` coin ``i`` is ``r[i]`` and the pair
            ``r[254], r[255]``, for every ``K <= 254``. The draft's own sampling must use other
            keys, except under ``"coupled"``, where it must use the same:
            ``noise_keys(seeds, positions, "verify")`` beside ``noise_keys(..., "draft", step)``.
            The very array that :func:`sample` drew by gives a ``RuntimeWarning``.
        positions: ``[B]`` int32, with ``"coupled"`` only: the absolute position of slot 0 in its
            sequence, by which drafting and every later call name the same noise.
        token_bitmask: ``[B, K + 1, ceil(V / 32)]`` int32, bit 1 = allowed (xgrammar's layout). A
            masked token of the target counts as -inf before everything else; the draft is not
            masked.
        logprobs: ``None``; ``"raw"``: log-softmax of the logits as given, mask ignored;
            ``"filtered"``: under the distribution sampled from (0 at temperature 0).
        stats: also return :class:`VerifyStats`. Reads all rows; never changes a token.
        stream: a CPU stream or device (default: the default one).

    Returns:
        VerifyResult: lazily evaluated arrays; learning the status needs no extra sync.

    A draft token ``>= V`` that the draft can produce is an ordinary proposal of target probability
    0. A token that no draft column or sparse id can produce, or ``< -1``, ends the draft there and
    the next token comes from that target row. Both set ``Status.OUT_OF_RANGE``, as does a length
    outside ``0..K``, which is clamped.

    Raises:
        TypeError: an argument is not an array (or a parameter not a number).
        ValueError: a wrong rank, shape, dtype, device, choice or combination. The message names the
            argument, what was expected and what came.
    """
    op = "verify_draft"
    check_arrays(
        op,
        target_logits=target_logits,
        draft_tokens=draft_tokens,
        draft_logits=draft_logits,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        draft_vocab=draft_vocab,
        draft_lengths=draft_lengths,
        draft_stats=draft_stats,
        uniforms=uniforms,
        keys=keys,
        positions=positions,
        token_bitmask=token_bitmask,
    )
    check_sampling(op, "sampling", sampling)
    draft_sampling = check_draft_sampling(op, draft_logits, draft_sampling, sampling)
    check_rule(op, rule, EXACT_RULES)
    one_hot = draft_logits is None and draft_ids is None and draft_tokens.shape[-1:] != (0,)
    if isinstance(rule, Cascade) and one_hot and not is_greedy(sampling.temperature):
        raise ValueError(
            f"[{op}] rule: expected draft_logits or draft_ids with {rule!r} (a one-hot draft is "
            "always certain), got neither, and a temperature that is not the number 0"
        )
    check_choice(op, "logprobs", logprobs, LOGPROBS)
    check_stream(op, stream)
    if not isinstance(stats, bool):
        raise TypeError(f"[{op}] stats: expected a bool, got {stats!r}")
    if keys is not None and rule != "coupled" and draft_tokens.shape[-1:] != (0,):
        warn_of_shared_noise(op, keys)
    keys = resolve_noise(op, rule, target_logits.shape[:-2], uniforms, keys)
    outputs = _ext.verify_draft(
        target_logits,
        draft_tokens,
        draft_lengths,
        draft_logits,
        draft_ids,
        draft_probs,
        draft_vocab,
        draft_stats,
        pack(sampling),
        pack(draft_sampling),
        pack_rule(rule),
        uniforms,
        keys,
        positions,
        token_bitmask,
        LOGPROBS.index(logprobs),
        stats,
        stream,
    )
    return VerifyResult(
        *outputs[:3],
        logprobs=outputs[3] if logprobs else None,
        stats=VerifyStats(*outputs[-4:]) if stats else None,
        exact=is_exact(rule),
    )


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
    """Draw one token per row of logits: a draft step, or plain decoding.

    The same law as :func:`verify_draft`, and ``row_stats`` for it to reuse. The token is drawn by
    an inverse CDF in two levels: the first uniform chooses a block of 2048 ids, the second an id of
    it.

    Args:
        logits: ``[B, V]`` or ``[V]`` float32, float16 or bfloat16, read in place.
        sampling: temperature and filters.
        rule: ``"independent"``, or ``"coupled"``: the choice by noise that is a function of key,
            position and token id, as in :func:`verify_draft`.
        uniforms: ``[B, 2]`` float32 in [0, 1); another value sets ``Status.BAD_PARAMETER``.
        keys: ``[B, 2]`` uint32; the pair is ``r[254], r[255]`` as in :func:`verify_draft`. For
            drafts ``noise_keys(seeds, positions, "draft", step)``. With neither, ``mx.random``
            supplies keys.
        positions: ``[B]`` int32, with ``"coupled"`` only: the token's absolute position.
        token_bitmask: ``[B, ceil(V / 32)]`` int32, bit 1 = allowed.
        logprobs: ``None``, ``"raw"`` or ``"filtered"``, as in :func:`verify_draft`.
        stream: a CPU stream or device (default: the default one).

    Returns:
        SampleResult

    Raises:
        TypeError, ValueError: as :func:`verify_draft`.
    """
    op = "sample"
    check_arrays(
        op,
        logits=logits,
        uniforms=uniforms,
        keys=keys,
        positions=positions,
        token_bitmask=token_bitmask,
    )
    check_sampling(op, "sampling", sampling)
    check_rule(op, rule, ("independent", "coupled"))
    check_choice(op, "logprobs", logprobs, LOGPROBS)
    check_stream(op, stream)
    if keys is not None and rule != "coupled" and not is_greedy(sampling.temperature):
        note_draw(keys)
    keys = resolve_noise(op, rule, logits.shape[:-1], uniforms, keys)
    tokens, status, row_stats, *rest = _ext.sample(
        logits,
        pack(sampling),
        pack_rule("coupled" if rule == "coupled" else "token")[0],
        uniforms,
        keys,
        positions,
        token_bitmask,
        LOGPROBS.index(logprobs),
        stream,
    )
    return SampleResult(tokens, status, rest[0] if rest else None, row_stats)

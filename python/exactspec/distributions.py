"""Speculative sampling of a single token, as plain functions of two distributions (NumPy, float64).

For analysis and for runtimes that keep short supports on the host; ``exactspec.verify_draft`` is
the operation for decoding. A SparseDistribution stays sparse: nothing here is as long as the
vocabulary unless an argument is.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Union

import numpy as np


@dataclass(frozen=True)
class SparseDistribution:
    """A distribution over a few token ids.

    Ids that occur more than once add up. NaN, infinite or negative probabilities raise: they are a
    fault upstream that would silently change the text.

    Attributes:
        token_ids: int64 ``[S]``, ids in ``[0, vocab_size)``, ascending and unique after
            construction.
        probs: float64 ``[S]``, renormalised.
        vocab_size: number of token ids.

    Raises:
        ValueError: not one-dimensional, of different lengths, ids that are no integers or out of
            range, a probability that is not finite or negative, or no mass.
    """

    token_ids: np.ndarray
    probs: np.ndarray
    vocab_size: int

    def __post_init__(self):
        ids = np.asarray(self.token_ids)
        probs = np.asarray(self.probs, dtype=np.float64)
        if ids.ndim != 1 or ids.shape != probs.shape:
            _bad("token_ids, probs", "two arrays [S]", f"{list(ids.shape)} and {list(probs.shape)}")
        total = _check_probs("probs", probs)
        if ids.dtype.kind not in "iu":
            _bad("token_ids", "integers", str(ids.dtype))
        size = self.vocab_size
        if isinstance(size, (bool, np.bool_)) or not isinstance(size, Integral):
            _bad("vocab_size", "an integer", repr(size))
        if not (0 <= ids.min() and ids.max() < min(size, 2**63)):
            _bad("token_ids", f"ids in [0, {size})", f"{ids.min()} to {ids.max()}")
        ids = ids.astype(np.int64)  # a copy
        if not (ids[1:] > ids[:-1]).all():
            ids, place = np.unique(ids, return_inverse=True)
            probs = np.bincount(place, weights=probs, minlength=len(ids))
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "probs", probs / total)

    @classmethod
    def one_hot(cls, token_id: int, vocab_size: int) -> SparseDistribution:
        """All mass on one token."""
        return cls(np.array([token_id]), np.array([1.0]), vocab_size)

    def probability(self, token_id: int | np.ndarray) -> float | np.ndarray:
        """The probability of an id, or float64 ``[...]`` of ids ``[...]``; 0 outside the support,
        so also for ids that are negative or beyond the vocabulary."""
        ids = _check_ids(token_id)
        place = np.minimum(self.token_ids.searchsorted(ids), len(self.token_ids) - 1)
        found = self.probs[place] * (self.token_ids[place] == ids)
        return found if ids.ndim else float(found)

    def to_dense(self) -> np.ndarray:
        """float64 ``[vocab_size]``."""
        dense = np.zeros(self.vocab_size)
        dense[self.token_ids] = self.probs
        return dense


Distribution = Union[np.ndarray, SparseDistribution]


def acceptance_probability(
    target: Distribution, draft: Distribution, token_id: int | np.ndarray
) -> float | np.ndarray:
    """The probability that a drafted token is accepted: ``min(1, target / draft)``.

    Leviathan et al. (2211.17192), section 2.3. A token with draft probability 0 is accepted iff its
    target probability is positive. An id that is no token of the target never is: the result is 0
    for ids beyond its vocabulary and for negative ones, such as ``PLACEHOLDER_TOKEN``, so that
    ragged drafts may be padded with -1. A decision is ``u * draft < target`` for ``u`` in [0, 1),
    strictly less: a token that the target cannot produce stays out also at ``u = 0``.

    Args:
        target, draft: ``[..., V]`` and ``[..., Vd]`` probabilities, or SparseDistribution.
        token_id: an id, or ids ``[...]``. Only their entries are read.

    Returns:
        A float, or float64 ``[...]`` for a batch.

    Raises:
        ValueError: ids that are no integers or do not go with the rows; an entry that is not
            finite or negative.
    """
    picked = [_entries(*side, token_id) for side in (("target", target), ("draft", draft))]
    return acceptance(*picked)


def residual_distribution(target: Distribution, draft: Distribution) -> Distribution:
    """What a rejected token is replaced from: ``max(target - draft, 0)`` renormalised.

    Leviathan et al. (2211.17192), section 2.3; Chen et al. (2302.01318), theorem 1. Where target
    and draft agree the residual has no mass, and the target is returned.

    Args:
        target, draft: ``[..., V]`` and ``[..., Vd]`` probabilities, or SparseDistribution. Dense
            rows are used as given, not rescaled: a rescaled row could swap their order. Draft mass
            outside the target's vocabulary takes part in nothing.

    Returns:
        float64 ``[..., V]``. If the target is sparse and the draft a single row, a
        SparseDistribution whose support is where the difference is positive.

    Raises:
        ValueError: a probability that is not finite or negative, or a row without mass.
    """
    target, draft = _rows("target", target), _rows("draft", draft)
    if isinstance(target, SparseDistribution):
        if not _is_row(draft):
            target = target.to_dense()
        else:
            residual = target.probs - _entries("draft", draft, target.token_ids)
            keep = residual > 0
            if not keep.any():
                return target
            residual = residual[keep]
            return _sparse(target.token_ids[keep], residual / residual.sum(), target.vocab_size)
    residual = np.maximum(_minus(target, draft), 0)
    mass = residual.sum(-1, keepdims=True)
    if not (mass > 0).all():
        residual = np.where(mass > 0, residual, target)
        mass = residual.sum(-1, keepdims=True)
    residual /= mass
    return residual


def speculative_output_marginal(target: Distribution, draft: Distribution) -> Distribution:
    """The distribution of the token that speculative sampling emits: the target, if all is right.

    The sum over every draft token of accepting it, and of rejecting it and drawing from the
    residual; a check of the law, not a shortcut to it.

    Args:
        target, draft: ``[..., V]`` and ``[..., Vd]`` probabilities, or SparseDistribution.

    Returns:
        float64 ``[..., V]``, or a SparseDistribution on the target's support if the target is
        sparse and the draft a single row. It is not renormalised: lost mass would show.

    Raises:
        ValueError: as ``residual_distribution``.
    """
    target, draft = (
        x if isinstance(x, SparseDistribution) else x / x.sum(-1, keepdims=True)
        for x in (_rows("target", target), _rows("draft", draft))
    )
    if isinstance(target, SparseDistribution):
        if not _is_row(draft):
            target = target.to_dense()
        else:
            drafted = _entries("draft", draft, target.token_ids)
            accepted = drafted * acceptance(target.probs, drafted)
            # With the drafts that the target cannot produce, all of them rejected.
            rejected = (draft.probs if isinstance(draft, SparseDistribution) else draft).sum()
            residual = residual_distribution(target, draft)
            emitted = (rejected - accepted.sum()) * residual.probability(target.token_ids)
            return _sparse(target.token_ids, accepted + emitted, target.vocab_size)
    if isinstance(draft, SparseDistribution):
        drafted = draft.probability(np.arange(target.shape[-1]))
        mass = draft.probs.sum()
    else:
        missing = target.shape[-1] - draft.shape[-1]
        drafted = np.pad(draft, [(0, 0)] * (draft.ndim - 1) + [(0, max(missing, 0))])
        drafted = drafted[..., : target.shape[-1]]
        mass = draft.sum(-1, keepdims=True)
    accepted = drafted * acceptance(target, drafted)
    rejected = mass - accepted.sum(-1, keepdims=True)
    return accepted + rejected * residual_distribution(target, draft)


def acceptance(target: float | np.ndarray, draft: float | np.ndarray) -> float | np.ndarray:
    """Of two probabilities of one token, or of arrays of them."""
    if isinstance(target, float) and isinstance(draft, float):
        return min(1.0, target / draft) if draft > 0 else float(target > 0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.minimum(1.0, target / draft)
    return np.where(draft > 0, ratio, target > 0)


def _minus(target: np.ndarray, draft: Distribution) -> np.ndarray:
    """The target's rows less the draft's, as long as the target's; a new array."""
    if isinstance(draft, SparseDistribution):
        difference = target.copy()
        inside = draft.token_ids < target.shape[-1]
        difference[..., draft.token_ids[inside]] -= draft.probs[inside]
        return difference
    size = min(target.shape[-1], draft.shape[-1])
    if size == target.shape[-1]:
        return target - draft[..., :size]
    batch = np.broadcast_shapes(target.shape[:-1], draft.shape[:-1])
    difference = np.broadcast_to(target, (*batch, target.shape[-1])).copy()
    difference[..., :size] -= draft
    return difference


def _is_row(distribution: Distribution) -> bool:
    return isinstance(distribution, SparseDistribution) or distribution.ndim == 1


def _rows(name: str, distribution: Distribution) -> Distribution:
    """Checked, and float64 if dense."""
    if isinstance(distribution, SparseDistribution):
        return distribution
    probs = _as_array(name, distribution)
    _check_probs(name, probs)
    return probs


def _entries(name: str, distribution: Distribution, token_id: int | np.ndarray):
    """The probabilities of ids; 0 for those that are no token of the distribution."""
    if isinstance(distribution, SparseDistribution):
        return distribution.probability(token_id)
    probs, ids = np.asarray(distribution), _check_ids(token_id)
    if probs.ndim == 0 or probs.shape[-1] == 0:
        got = "a number" if probs.ndim == 0 else f"shape {list(probs.shape)}"
        _bad(name, "an array [..., V] of at least one probability", got)
    inside = (ids >= 0) & (ids < probs.shape[-1])
    if probs.ndim == 1:
        picked = probs[np.where(inside, ids, 0)]
    else:
        try:
            batch = np.broadcast_shapes(probs.shape[:-1], ids.shape)
        except ValueError:
            _bad("token_id", f"an id or ids {list(probs.shape[:-1])}", f"ids {list(ids.shape)}")
        rows = np.broadcast_to(probs, (*batch, probs.shape[-1]))
        places = np.broadcast_to(np.where(inside, ids, 0), batch)[..., None]
        picked = np.take_along_axis(rows, places, -1)[..., 0]
    picked = np.where(inside, picked, 0).astype(np.float64)
    if not ((picked >= 0) & np.isfinite(picked)).all():
        _bad(name, "finite probabilities >= 0", "NaN, an infinite or a negative one")
    return picked if picked.ndim else float(picked)


def _sparse(ids: np.ndarray, probs: np.ndarray, vocab_size: int) -> SparseDistribution:
    """Of ascending ids and probabilities as they are."""
    result = object.__new__(SparseDistribution)
    for name, value in (("token_ids", ids), ("probs", probs), ("vocab_size", vocab_size)):
        object.__setattr__(result, name, value)
    return result


def _as_array(name: str, distribution: np.ndarray) -> np.ndarray:
    probs = np.asarray(distribution, dtype=np.float64)
    if probs.ndim == 0:
        _bad(name, "an array [..., V]", "a number")
    return probs


def _check_ids(token_id: int | np.ndarray) -> np.ndarray:
    ids = np.asarray(token_id)
    if ids.dtype.kind not in "iu":
        _bad("token_id", "integers in 64 bits", str(ids.dtype))
    return ids


def _check_probs(name: str, probs: np.ndarray) -> np.ndarray:
    """Sums of the rows. NaN and infinities show in the sum and the minimum, without a mask."""
    with np.errstate(over="ignore"):
        total = probs.sum(-1)
    if not (np.isfinite(total).all() and probs.min(initial=0) >= 0):
        _bad(name, "finite probabilities >= 0", "NaN, an infinite or a negative one")
    if not (total > 0).all():
        _bad(name, "a positive sum", "no mass")
    return total


def _bad(name: str, expected: str, got: str) -> None:
    raise ValueError(f"[distributions] {name}: expected {expected}, got {got}")

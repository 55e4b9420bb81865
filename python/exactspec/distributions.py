"""Speculative sampling of a single token, as plain functions of two distributions (NumPy, float64).

For analysis and for runtimes that keep short supports on the host; ``exactspec.verify_draft`` is
the operation for decoding. Names and fields follow MTPLX's ``mtplx.sampling``, so that its users
can swap the import. What differs on purpose is said where it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import numpy as np


@dataclass(frozen=True)
class SparseDistribution:
    """A distribution over a few token ids.

    Unlike MTPLX's, ids that occur more than once add up everywhere (there, ``probability`` takes
    the first and a dense copy the last), and NaN, infinite or negative probabilities raise instead
    of counting as 0: they are a fault upstream that would silently change the text.

    Attributes:
        token_ids: int64 ``[S]``, ids in ``[0, vocab_size)``, ascending and unique after
            construction.
        probs: float64 ``[S]``, renormalised.
        vocab_size: number of token ids.

    Raises:
        ValueError: not one-dimensional, of different lengths, an id out of range, a probability
            that is not finite or negative, or no mass.
    """

    token_ids: np.ndarray
    probs: np.ndarray
    vocab_size: int

    def __post_init__(self):
        ids = np.asarray(self.token_ids, dtype=np.int64)
        probs = np.asarray(self.probs, dtype=np.float64)
        if ids.ndim != 1 or ids.shape != probs.shape:
            _bad("token_ids, probs", "two arrays [S]", f"{list(ids.shape)} and {list(probs.shape)}")
        if ids.size and not (0 <= ids.min() and ids.max() < self.vocab_size):
            _bad("token_ids", f"ids in [0, {self.vocab_size})", f"{ids.min()} to {ids.max()}")
        _check_probs("probs", probs)
        unique, place = np.unique(ids, return_inverse=True)
        merged = np.bincount(place, weights=probs, minlength=len(unique))
        object.__setattr__(self, "token_ids", unique)
        object.__setattr__(self, "probs", merged / merged.sum())

    @classmethod
    def one_hot(cls, token_id: int, vocab_size: int) -> SparseDistribution:
        """All mass on one token."""
        return cls(np.array([token_id]), np.array([1.0]), vocab_size)

    def probability(self, token_id: int) -> float:
        """The probability of one token; 0 outside the support."""
        return float(self.probs[self.token_ids == token_id].sum())

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
    target probability is positive; a token outside the target's vocabulary never is. A decision is
    ``u * draft < target`` for ``u`` in [0, 1), strictly less, unlike MTPLX's ``u <= target /
    draft``: a token that the target cannot produce stays out also at ``u = 0``.

    Args:
        target, draft: ``[..., V]`` and ``[..., Vd]`` probabilities, or SparseDistribution.
        token_id: an id, or ids ``[...]``.

    Returns:
        A float, or float64 ``[...]`` for a batch.
    """
    target, draft = _pair(target, draft)
    ids = np.expand_dims(np.asarray(token_id), -1)
    picked = [np.take_along_axis(x, ids, -1)[..., 0] for x in np.broadcast_arrays(target, draft)]
    accept = _accept(*picked)
    return float(accept) if accept.ndim == 0 else accept


def residual_distribution(target: Distribution, draft: Distribution) -> Distribution:
    """What a rejected token is replaced from: ``max(target - draft, 0)`` renormalised.

    Leviathan et al. (2211.17192), section 2.3; Chen et al. (2302.01318), theorem 1. Where target
    and draft agree the residual has no mass, and the target is returned.

    Args:
        target, draft: ``[..., V]`` and ``[..., Vd]`` probabilities, or SparseDistribution. Dense
            rows are used as given, not rescaled. Draft mass outside the target's vocabulary takes
            part in nothing.

    Returns:
        float64 ``[..., V]``; a SparseDistribution, whose support is where the difference is
        positive, if both are.
    """
    dense_target, dense_draft = _pair(target, draft)
    size = _size(target)
    residual = np.maximum(dense_target - dense_draft, 0)[..., :size]
    mass = residual.sum(-1, keepdims=True)
    residual = np.where(mass > 0, residual, dense_target[..., :size])
    residual = residual / residual.sum(-1, keepdims=True)
    if isinstance(target, SparseDistribution) and isinstance(draft, SparseDistribution):
        ids = np.flatnonzero(residual)
        return SparseDistribution(ids, residual[ids], size)
    return residual


def speculative_output_marginal(target: Distribution, draft: Distribution) -> np.ndarray:
    """The distribution of the token that speculative sampling emits: the target, if all is right.

    The sum over every draft token of accepting it, and of rejecting it and drawing from the
    residual; a check of the law, not a shortcut to it.

    Args:
        target, draft: ``[..., V]`` and ``[..., Vd]`` probabilities, or SparseDistribution.

    Returns:
        float64 ``[..., V]``.
    """
    dense_target, dense_draft = (x / x.sum(-1, keepdims=True) for x in _pair(target, draft))
    accepted = dense_draft * _accept(dense_target, dense_draft)
    rejected = (dense_draft - accepted).sum(-1, keepdims=True)
    residual = residual_distribution(dense_target[..., : _size(target)], dense_draft)
    return accepted[..., : _size(target)] + rejected * residual


def _accept(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.minimum(1.0, target / draft)
    return np.where(draft > 0, ratio, (target > 0).astype(np.float64))


def _size(distribution: Distribution) -> int:
    if isinstance(distribution, SparseDistribution):
        return distribution.vocab_size
    return np.shape(distribution)[-1]


def _pair(target: Distribution, draft: Distribution) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 rows of the same length, as given: a rescaled row could swap their order."""
    rows = [_dense("target", target), _dense("draft", draft)]
    width = max(row.shape[-1] for row in rows)
    return tuple(
        np.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, width - row.shape[-1])]) for row in rows
    )


def _dense(name: str, distribution: Distribution) -> np.ndarray:
    if isinstance(distribution, SparseDistribution):
        return distribution.to_dense()
    probs = np.asarray(distribution, dtype=np.float64)
    if probs.ndim == 0:
        _bad(name, "an array [..., V]", "a number")
    _check_probs(name, probs)
    return probs


def _check_probs(name: str, probs: np.ndarray) -> None:
    if not (np.isfinite(probs).all() and (probs >= 0).all()):
        _bad(name, "finite probabilities >= 0", "NaN, an infinite or a negative one")
    if not (probs.sum(-1) > 0).all():
        _bad(name, "a positive sum", "no mass")


def _bad(name: str, expected: str, got: str) -> None:
    raise ValueError(f"[distributions] {name}: expected {expected}, got {got}")

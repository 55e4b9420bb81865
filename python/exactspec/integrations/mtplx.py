"""The functions of ``mtplx.sampling`` on top of exactspec's.

MTPLX is a runtime that drafts with MTP heads on Apple silicon, https://github.com/youssofal/mtplx.
``from exactspec.integrations.mtplx import ...`` takes the place of ``from mtplx.sampling import
...`` (MTPLX 2.12): the same names, parameters and fields, and the same token for the same generator
but for rounding. Terms here are MTPLX's: ``target_p`` and ``draft_q`` are what the rest of the
package calls target and draft. MTPLX itself is not needed.

Differences on purpose; each keeps a fault from altering the text:

* The coin is strict, ``u < acceptance``, there ``<=``: with ``u = 0.0``, ``target_p [1, 0]`` and
  ``draft_q [0, 1]``, token 1 is rejected, there accepted though the target cannot produce it.
* An id that is no token is never accepted: ``acceptance_probability([.2, .8], [.8, .2], -1)`` is
  0.0, there 1.0, the last token's; for id 5 it is 0.0, there an IndexError.
* Ids that occur more than once add up: of ``token_ids [4, 4]``, ``probs [.5, .5]``,
  ``probability(4)`` is 1.0, there 0.5, and so is ``to_dense()[4]``.
* Ids outside ``[0, vocab_size)`` are refused: ``SparseDistribution([3], [1.], 3)`` is a ValueError,
  there accepted.
* NaN and infinite probabilities raise NonFiniteLogitsError. There they count as 0 in
  ``SparseDistribution([0, 1], [nan, 1.], 2)`` and in a dense residual, and
  ``acceptance_probability([nan, 1.], [.5, .5], 0)`` is 1.0.
* Negative probabilities raise ValueError, there in a SparseDistribution only:
  ``residual_distribution([.5, .5], [-.5, 1.5])``.
* At temperature 0 a row with NaN or without a finite logit raises NonFiniteLogitsError:
  ``softmax([nan, 1.], 0)`` and ``softmax([-inf, -inf], 0)``, there all mass on token 0.
* Two widths are allowed: ``residual_distribution([.5, .5], [.25, .25, .5])`` is ``[.5, .5]``, there
  a ValueError. Draft mass outside the target's vocabulary plays no part, as there between sparse
  ones.
* ``speculative_output_marginal`` is not divided by its sum, so lost mass shows; its time grows with
  the vocabulary, there with its square; for the draft ``[0, 0]`` it is a ValueError, there NaN.
* Penalties on ids outside the row are a ValueError: ``apply_penalties(zeros(4), {-1: 1}, 1.0)``,
  there the last token's.
* ``NonFiniteLogitsError`` has no ``kv_attention``, a record of MTPLX's server, and can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

import numpy as np

from .. import distributions as _exact

PENALTY_MIN, PENALTY_MAX = -2.0, 2.0


@dataclass(frozen=True)
class SamplerConfig:
    """How logits become a distribution.

    Attributes:
        temperature: 0 or less is greedy.
        top_p: keep the likeliest tokens of this total probability; off outside (0, 1).
        top_k: keep the k likeliest tokens; off outside (0, V).
        presence_penalty, frequency_penalty: see ``apply_penalties``.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class NonFiniteLogitsError(RuntimeError):
    """NaN, infinite or missing mass where a distribution is needed.

    Attributes:
        nan_count, inf_count, vocab_size: of the row, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        nan_count: int | None = None,
        inf_count: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        counts = {"nan": nan_count, "inf": inf_count, "vocab": vocab_size}
        known = ", ".join(f"{name}={count}" for name, count in counts.items() if count is not None)
        super().__init__(f"{message} ({known})" if known else message)
        self.message = message
        self.nan_count, self.inf_count, self.vocab_size = nan_count, inf_count, vocab_size

    def __reduce__(self):
        # Between processes: by default an error is made anew from its text alone.
        return _unpickled_error, (self.message, self.nan_count, self.inf_count, self.vocab_size)


def _unpickled_error(message, nan_count, inf_count, vocab_size):
    return NonFiniteLogitsError(
        message, nan_count=nan_count, inf_count=inf_count, vocab_size=vocab_size
    )


def non_finite_logits_error(logits: np.ndarray, where: str) -> NonFiniteLogitsError:
    """The error for a row ``[V]`` found in ``where``, with its counts."""
    row = np.asarray(logits)
    return NonFiniteLogitsError(
        f"non-finite logits in {where}",
        nan_count=int(np.isnan(row).sum()),
        inf_count=int(np.isinf(row).sum()),
        vocab_size=row.size,
    )


@dataclass(frozen=True)
class SparseDistribution:
    """A distribution over a few ids, which keep their order: it decides what a generator draws.

    Attributes:
        token_ids: int64 ``[S]``.
        probs: float64 ``[S]``, renormalised.
        vocab_size: number of token ids.

    Raises:
        ValueError: not one-dimensional, empty, of different lengths, an id out of range, a negative
            probability.
        NonFiniteLogitsError: a probability that is not finite, or no mass.
    """

    token_ids: np.ndarray
    probs: np.ndarray
    vocab_size: int

    def __post_init__(self):
        probs = np.asarray(self.probs, dtype=np.float64)
        if probs.size and not (np.isfinite(probs).all() and probs.any()):
            raise non_finite_logits_error(probs, "SparseDistribution")
        ordered = _exact.SparseDistribution(self.token_ids, probs, self.vocab_size)
        object.__setattr__(self, "token_ids", np.array(self.token_ids, dtype=np.int64))
        object.__setattr__(self, "probs", probs / probs.sum())
        # The same with sorted, unique ids: no field.
        object.__setattr__(self, "_sorted", ordered)

    @classmethod
    def one_hot(cls, token_id: int, vocab_size: int) -> SparseDistribution:
        """All mass on one token."""
        return cls(np.array([int(token_id)]), np.array([1.0]), vocab_size)

    def probability(self, token_id: int) -> float:
        """The probability of one token; 0 outside the support."""
        token_id = int(token_id)
        return self._sorted.probability(token_id) if 0 <= token_id < self.vocab_size else 0.0

    def to_dense(self) -> np.ndarray:
        """float64 ``[vocab_size]``."""
        return self._sorted.to_dense()


Distribution = Union[np.ndarray, SparseDistribution]


def softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """The distribution of a row of logits ``[V]``: float64 ``[V]``; 0 or less is greedy.

    Raises:
        NonFiniteLogitsError: NaN, no finite logit, or +inf at a temperature above 0.
    """
    logits = np.asarray(logits, dtype=np.float64)
    highest = logits.max()  # NaN if there is one
    if np.isnan(highest) or highest == -np.inf or (highest == np.inf and temperature > 0):
        raise non_finite_logits_error(logits, "softmax")
    if temperature <= 0:
        return np.eye(1, logits.size, int(logits.argmax()))[0]
    # Scaled before the maximum is taken off, as there: the last bit decides what is drawn.
    scaled = logits / float(temperature)
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def deterministic_top_k_order(values: np.ndarray, top_k: int) -> np.ndarray:
    """int64 ids of the ``top_k`` largest values ``[V]``, largest first, lower ids first in ties."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"[mtplx] values: expected [V], got {list(values.shape)}")
    count = min(max(int(top_k), 0), values.size)
    if count == 0:
        return np.zeros(0, np.int64)
    candidates = np.arange(values.size)
    if count < values.size:
        least = np.partition(values, values.size - count)[-count]
        candidates = np.flatnonzero(values >= least)
    return candidates[np.argsort(-values[candidates], kind="stable")[:count]]


def apply_top_p_top_k(probs: np.ndarray, top_p: float = 1.0, top_k: int = 0) -> np.ndarray:
    """Keep tokens ``[V]`` that pass both filters, each measured on ``probs`` as given: float64 [V].

    A token passes top_p while less than that lies before it. The values at which a filter is off
    are those of ``SamplerConfig``.
    """
    probs = np.asarray(probs, dtype=np.float64)
    if probs.ndim != 1:
        raise ValueError(f"[mtplx] probs: expected [V], got {list(probs.shape)}")
    if not np.isfinite(probs.sum()):
        raise non_finite_logits_error(probs, "apply_top_p_top_k")
    cuts_k, cuts_p = 0 < int(top_k or 0) < probs.size, 0 < top_p < 1
    if not (cuts_k or cuts_p):
        kept, total = probs, probs.sum()
    else:
        order = deterministic_top_k_order(probs, top_k if cuts_k else probs.size)
        if cuts_p:
            # The first always stays.
            reached = np.cumsum(probs[order[:-1]])
            order = order[: 1 + np.count_nonzero(reached < top_p)]
        kept = np.zeros(probs.size)
        kept[order] = probs[order]
        total = kept.sum()
    if not total > 0:
        return np.eye(1, probs.size, int(probs.argmax()))[0]
    return kept / total


def apply_top_k_top_p(probs: np.ndarray, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """``apply_top_p_top_k``: the order of the two makes no difference."""
    return apply_top_p_top_k(probs, top_p, top_k)


def apply_penalties(
    logits: np.ndarray,
    token_counts: Mapping[int, int] | None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_overlay: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Take OpenAI's presence and frequency penalties off raw logits ``[V]``.

    A token counted ``n > 0`` times loses ``frequency_penalty * n + presence_penalty``, each clamped
    to [-2, 2]; what ``penalty_overlay`` says about a token is taken off as it is. Returns float64
    ``[V]``, or ``logits`` itself if there is nothing to take off.

    Raises:
        ValueError: an id outside ``[0, V)``.
    """
    presence, frequency = (
        float(np.clip(penalty, PENALTY_MIN, PENALTY_MAX))
        for penalty in (presence_penalty, frequency_penalty)
    )
    off: dict[int, float] = {}
    if token_counts and (presence or frequency):
        off = {i: frequency * n + presence * (n > 0) for i, n in token_counts.items()}
    for token_id, penalty in (penalty_overlay or {}).items():
        off[token_id] = off.get(token_id, 0.0) + penalty
    if not off:
        return logits
    penalised = np.array(logits, dtype=np.float64)
    if not (0 <= min(off) and max(off) < penalised.size):
        expected = f"expected ids in [0, {penalised.size})"
        raise ValueError(f"[mtplx] penalties: {expected}, got {min(off)} to {max(off)}")
    penalised[list(off)] -= list(off.values())
    return penalised


def distribution_from_logits(
    logits: np.ndarray,
    config: SamplerConfig,
    *,
    token_counts: Mapping[int, int] | None = None,
    penalty_overlay: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Penalties, temperature, then both filters: float64 ``[V]`` from logits ``[V]``."""
    logits = apply_penalties(
        logits,
        token_counts,
        config.presence_penalty,
        config.frequency_penalty,
        penalty_overlay,
    )
    return apply_top_p_top_k(softmax(logits, config.temperature), config.top_p, config.top_k)


def acceptance_probability(target_p: Distribution, draft_q: Distribution, token_id: int) -> float:
    """``exactspec.acceptance_probability`` of one id. Of a dense row only its entry is read.

    Raises:
        NonFiniteLogitsError: the entry is not finite.
        ValueError: it is negative.
    """
    token_id = int(token_id)
    return _exact.acceptance(_entry(target_p, token_id), _entry(draft_q, token_id))


def residual_distribution(target_p: Distribution, draft_q: Distribution) -> Distribution:
    """``exactspec.residual_distribution`` of two rows; sparse if both are.

    A draft without mass takes nothing off: the target is returned, renormalised.

    Raises:
        NonFiniteLogitsError: NaN or infinite probabilities.
        ValueError: a negative one, or a target without mass.
    """
    target, draft = _whole(target_p), _whole(draft_q)
    if isinstance(draft, np.ndarray) and not draft.any():
        draft = target  # they agree: nothing is left
    residual = _exact.residual_distribution(target, draft)
    if not isinstance(residual, _exact.SparseDistribution):
        return residual
    if isinstance(draft_q, SparseDistribution):
        if residual is target:
            return target_p
        return SparseDistribution(residual.token_ids, residual.probs, residual.vocab_size)
    return residual.to_dense()


def sample_from_distribution(probs: Distribution, rng: np.random.Generator | None = None) -> int:
    """Draw an id with one number of the generator, in the order of the distribution's ids."""
    rng = np.random.default_rng() if rng is None else rng
    if isinstance(probs, SparseDistribution):
        return int(rng.choice(probs.token_ids, p=probs.probs))
    probs = _whole(probs)
    return int(rng.choice(probs.size, p=probs / probs.sum()))


@dataclass(frozen=True)
class SpeculativeDecision:
    """What became of a draft token: ``token_id`` is the one to emit."""

    accepted: bool
    token_id: int
    accept_probability: float


def verify_one_token(
    target_p: Distribution,
    draft_q: Distribution,
    draft_token: int,
    rng: np.random.Generator | None = None,
) -> SpeculativeDecision:
    """Accept a draft token, or replace it from the residual: one number drawn, or two.

    Raises:
        NonFiniteLogitsError, ValueError: as ``acceptance_probability`` and, after a rejection,
            ``residual_distribution``.
    """
    rng = np.random.default_rng() if rng is None else rng
    acceptance = acceptance_probability(target_p, draft_q, draft_token)
    if rng.random() < acceptance:
        return SpeculativeDecision(True, int(draft_token), acceptance)
    replacement = sample_from_distribution(residual_distribution(target_p, draft_q), rng)
    return SpeculativeDecision(False, replacement, acceptance)


def speculative_output_marginal(target_p: Distribution, draft_q: Distribution) -> np.ndarray:
    """``exactspec.speculative_output_marginal`` of two rows, as float64 ``[V]``."""
    marginal = _exact.speculative_output_marginal(_whole(target_p), _whole(draft_q))
    return marginal if isinstance(marginal, np.ndarray) else marginal.to_dense()


def _entry(distribution: Distribution, token_id: int) -> float:
    if isinstance(distribution, SparseDistribution):
        return distribution.probability(token_id)
    value = float(distribution[token_id]) if 0 <= token_id < len(distribution) else 0.0
    if not math.isfinite(value):
        raise non_finite_logits_error(distribution, "a distribution")
    if value < 0:
        raise ValueError(f"[mtplx] distribution: expected probabilities >= 0, got {value}")
    return value


def _whole(distribution: Distribution) -> np.ndarray | _exact.SparseDistribution:
    if isinstance(distribution, SparseDistribution):
        return distribution._sorted
    row = np.asarray(distribution, dtype=np.float64)
    if row.ndim != 1:
        raise ValueError(f"[mtplx] distribution: expected [V], got {list(row.shape)}")
    if not np.isfinite(row.sum()):
        raise non_finite_logits_error(row, "a distribution")
    return row

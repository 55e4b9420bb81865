"""The pointwise helpers: the emitted law is the target's, supports, batches, bad input."""

from __future__ import annotations

import numpy as np
import pytest
from exactspec import (
    SparseDistribution,
    acceptance_probability,
    residual_distribution,
    speculative_output_marginal,
)
from hypothesis import given
from hypothesis import strategies as st

# float64 sums of at most 24 probabilities.
EXACT = 1e-12


@st.composite
def probabilities(draw, size=None, positive=False):
    """A distribution, some of it zero."""
    size = draw(st.integers(1, 12)) if size is None else size
    weights = draw(st.lists(st.integers(int(positive), 5), min_size=size, max_size=size))
    weights[draw(st.integers(0, size - 1))] += 1
    return np.array(weights) / sum(weights)


@st.composite
def sparse(draw, vocab_size):
    ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=8))
    return SparseDistribution(np.array(ids), draw(probabilities(size=len(ids))), vocab_size)


@given(probabilities(), probabilities())
def test_emitted_law_is_the_target(target, draft):
    """Also for a draft with more or fewer tokens than the target."""
    marginal = speculative_output_marginal(target, draft)
    np.testing.assert_allclose(marginal, target, rtol=0, atol=EXACT)


@given(st.integers(1, 12).flatmap(lambda v: st.tuples(sparse(v), sparse(v))))
def test_sparse_and_dense_agree(pair):
    target, draft = pair
    marginal = speculative_output_marginal(target, draft)
    np.testing.assert_allclose(marginal, target.to_dense(), rtol=0, atol=EXACT)
    dense = residual_distribution(target.to_dense(), draft.to_dense())
    residual = residual_distribution(target, draft)
    np.testing.assert_allclose(residual.to_dense(), dense, rtol=0, atol=EXACT)
    for token in range(target.vocab_size):
        assert acceptance_probability(target, draft, token) == pytest.approx(
            acceptance_probability(target.to_dense(), draft.to_dense(), token)
        )


@given(st.integers(1, 12).flatmap(lambda v: st.tuples(probabilities(v), probabilities(v))))
def test_residual_has_the_support_of_the_positive_difference(pair):
    target, draft = pair
    residual = residual_distribution(target, draft)
    difference = target - draft
    assert residual.sum() == pytest.approx(1)
    if (difference > 0).any():
        np.testing.assert_array_equal(residual > 0, difference > 0)
    else:
        np.testing.assert_allclose(residual, target)


def test_batches_are_rows():
    rng = np.random.default_rng(0)
    target, draft = rng.dirichlet(np.ones(6), (3, 4)), rng.dirichlet(np.ones(8), (3, 4))
    tokens = rng.integers(0, 8, (3, 4))
    residual = residual_distribution(target, draft)
    marginal = speculative_output_marginal(target, draft)
    accept = acceptance_probability(target, draft, tokens)
    assert residual.shape == marginal.shape == (3, 4, 6) and accept.shape == (3, 4)
    for i in np.ndindex(3, 4):
        np.testing.assert_allclose(residual[i], residual_distribution(target[i], draft[i]))
        np.testing.assert_allclose(marginal[i], target[i], atol=EXACT)
        assert accept[i] == acceptance_probability(target[i], draft[i], tokens[i])


def test_acceptance():
    target, draft = np.array([0.25, 0.75, 0.0]), np.array([0.5, 0.25, 0.25])
    assert [acceptance_probability(target, draft, i) for i in range(3)] == [0.5, 1.0, 0.0]
    # Draft probability 0: accepted iff the target can produce the token.
    one_hot = SparseDistribution.one_hot(0, 3)
    assert [acceptance_probability(target, one_hot, i) for i in range(3)] == [0.25, 1.0, 0.0]


def test_used_as_mtplx_uses_it():
    """Positional arguments and fields as ``mtplx.generation`` calls them."""
    target = SparseDistribution(np.array([3, 5]), np.array([0.75, 0.25]), 8)
    draft = SparseDistribution.one_hot(3, int(target.vocab_size))
    assert acceptance_probability(target, draft, int(np.int64(3))) == 0.75
    residual = residual_distribution(target, draft)
    assert isinstance(residual, SparseDistribution) and residual.vocab_size == 8
    rng = np.random.default_rng(0)
    assert int(rng.choice(residual.token_ids, p=residual.probs)) == 5
    mixed = residual_distribution(target, draft.to_dense())
    assert isinstance(mixed, np.ndarray) and mixed.tolist() == residual.to_dense().tolist()


def test_repeated_ids_add_up():
    twice = SparseDistribution(np.array([4, 1, 4]), np.array([1.0, 2.0, 1.0]), 6)
    assert twice.token_ids.tolist() == [1, 4]
    assert twice.probs.tolist() == [0.5, 0.5]
    assert twice.probability(4) == 0.5 and twice.probability(0) == 0.0
    assert twice.to_dense().tolist() == [0, 0.5, 0, 0, 0.5, 0]


def test_inputs_are_not_written_to():
    target, draft = np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.3, 0.5])
    before = target.copy(), draft.copy()
    speculative_output_marginal(target, draft)
    np.testing.assert_array_equal((target, draft), before)


@pytest.mark.parametrize(
    "ids, probs, message",
    [
        ([0, 1], [1.0], r"token_ids, probs: expected two arrays \[S\], got \[2\] and \[1\]"),
        ([], [], "probs: expected a positive sum, got no mass"),
        ([3], [1.0], r"token_ids: expected ids in \[0, 3\), got 3 to 3"),
        ([-1], [1.0], "token_ids: expected ids"),
        ([0], [np.nan], "probs: expected finite probabilities"),
        ([0, 1], [2.0, -1.0], "probs: expected finite probabilities"),
        ([0], [0.0], "probs: expected a positive sum"),
    ],
)
def test_bad_sparse_distributions(ids, probs, message):
    with pytest.raises(ValueError, match=r"^\[distributions\] " + message):
        SparseDistribution(np.array(ids), np.array(probs), 3)


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-0.5, 1.5], [0.0, 0.0], 1.0])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_bad_dense_distributions(side, bad):
    good = np.array([0.5, 0.5])
    pair = {"target": good, "draft": good, side: bad}
    with pytest.raises(ValueError, match=rf"^\[distributions\] {side}: expected"):
        residual_distribution(**pair)

"""The pointwise helpers: the emitted law is the target's, supports, batches, bad input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from exactspec import (
    PLACEHOLDER_TOKEN,
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
    dense = residual_distribution(target.to_dense(), draft.to_dense())
    for target_side, draft_side in itertools.product(
        (target, target.to_dense()), (draft, draft.to_dense())
    ):
        marginal = speculative_output_marginal(target_side, draft_side)
        residual = residual_distribution(target_side, draft_side)
        # The residual lies within the target's support, so a sparse target's is sparse.
        if target_side is target:
            assert isinstance(marginal, SparseDistribution)
            assert isinstance(residual, SparseDistribution)
            marginal, residual = marginal.to_dense(), residual.to_dense()
        np.testing.assert_allclose(marginal, target.to_dense(), rtol=0, atol=EXACT)
        np.testing.assert_allclose(residual, dense, rtol=0, atol=EXACT)
        ids = np.arange(-2, target.vocab_size + 2)
        accept = acceptance_probability(target_side, draft_side, ids)
        for token, probability in zip(ids, accept):
            assert acceptance_probability(target_side, draft_side, token) == probability
            one_by_one = acceptance_probability(target.to_dense(), draft.to_dense(), token)
            assert probability == one_by_one


def test_sparse_stays_sparse():
    """No array of the vocabulary's length could be made here: 8 TB."""
    size = 2**40
    target = SparseDistribution(np.array([size - 1, 3]), np.array([0.75, 0.25]), size)
    draft = SparseDistribution(np.array([3, 5, size - 1]), np.array([0.5, 0.25, 0.25]), size)
    ids = np.array([3, 5, size - 1, 4])
    assert acceptance_probability(target, draft, ids).tolist() == [0.5, 0, 1, 0]
    assert acceptance_probability(target, draft, 3) == 0.5
    residual = residual_distribution(target, draft)
    assert (residual.token_ids.tolist(), residual.probs.tolist()) == ([size - 1], [1.0])
    assert residual_distribution(target, target) is target
    marginal = speculative_output_marginal(target, draft)
    assert marginal.token_ids.tolist() == [3, size - 1]
    np.testing.assert_allclose(marginal.probs, [0.25, 0.75], rtol=0, atol=EXACT)
    # A dense side of another length.
    assert residual_distribution(target, np.array([0.5, 0.5])).vocab_size == size
    dense = residual_distribution(np.array([0.0, 0.0, 0.0, 1.0]), draft)
    assert dense.tolist() == [0, 0, 0, 1]


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


@pytest.mark.parametrize("target_is_sparse", [False, True])
@pytest.mark.parametrize("draft_is_sparse", [False, True])
def test_ids_that_are_no_token_of_the_target_are_never_accepted(target_is_sparse, draft_is_sparse):
    """Negative ids, the placeholder of ragged drafts among them, and ids beyond both widths."""
    target, draft = np.array([0.2, 0.8]), np.array([0.8, 0.2])
    if target_is_sparse:
        target = SparseDistribution(np.arange(2), target, 2)
    if draft_is_sparse:
        draft = SparseDistribution(np.arange(2), draft, 2)
    for token in (PLACEHOLDER_TOKEN, -2, -(2**40), 2, 5, 2**40):
        assert acceptance_probability(target, draft, token) == 0.0
        assert acceptance_probability(target, draft, np.int64(token)) == 0.0
    ids = np.array([[0, -1, 1], [5, 1, -7]])
    assert acceptance_probability(target, draft, ids).tolist() == [[0.25, 0, 1], [0, 1, 0]]
    with pytest.raises(ValueError, match=r"^\[distributions\] token_id: expected integers"):
        acceptance_probability(target, draft, 0.5)


def test_an_id_of_one_side_only():
    narrow, wide = np.array([0.25, 0.75]), np.array([0.5, 0.25, 0.25])
    assert acceptance_probability(narrow, wide, 2) == 0.0
    # The draft cannot have drawn it: accepted, as the target can produce it.
    assert acceptance_probability(wide, narrow, 2) == 1.0


def test_ids_must_go_with_the_rows():
    rows = np.full((3, 4), 0.25)
    assert acceptance_probability(rows, rows, np.array([1, -1, 4])).tolist() == [1, 0, 0]
    assert acceptance_probability(rows, rows[0], 1).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=r"token_id: expected an id or ids \[3\], got ids \[2\]"):
        acceptance_probability(rows, rows, np.array([1, 2]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_acceptance_checks_the_entries_it_reads(side, bad):
    good = np.array([0.5, 0.5])
    pair = {"target": good, "draft": good, side: np.array([0.5, bad])}
    assert acceptance_probability(**pair, token_id=0) == 1.0
    with pytest.raises(ValueError, match=rf"^\[distributions\] {side}: expected finite"):
        acceptance_probability(**pair, token_id=1)


def test_repeated_ids_add_up():
    twice = SparseDistribution(np.array([4, 1, 4]), np.array([1.0, 2.0, 1.0]), 6)
    assert twice.token_ids.tolist() == [1, 4]
    assert twice.probs.tolist() == [0.5, 0.5]
    assert twice.probability(4) == 0.5 and twice.probability(0) == 0.0
    assert twice.probability(np.array([4, -1, 9])).tolist() == [0.5, 0, 0]
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
        ([0.5], [1.0], "token_ids: expected integers, got float64"),
        ([0, 1], [1e308, 1e308], "probs: expected finite probabilities"),
        ([0], [np.nan], "probs: expected finite probabilities"),
        ([0, 1], [2.0, -1.0], "probs: expected finite probabilities"),
        ([0], [0.0], "probs: expected a positive sum"),
    ],
)
def test_bad_sparse_distributions(ids, probs, message):
    with pytest.raises(ValueError, match=r"^\[distributions\] " + message):
        SparseDistribution(np.array(ids), np.array(probs), 3)


@pytest.mark.parametrize("vocab_size", [5.5, 5.0, True, "5"])
def test_vocab_size_is_an_integer(vocab_size):
    with pytest.raises(ValueError, match="vocab_size: expected an integer, got"):
        SparseDistribution(np.array([0]), np.array([1.0]), vocab_size)


def test_ids_have_64_bits():
    ids = np.array([2**63], np.uint64)
    with pytest.raises(ValueError, match="token_ids: expected ids in"):
        SparseDistribution(ids, np.array([1.0]), 2**64)


@pytest.mark.parametrize("target, draft", [([], [1.0]), ([1.0], []), (np.zeros((2, 0)), [1.0])])
def test_rows_without_an_entry(target, draft):
    with pytest.raises(ValueError, match=r"expected an array \[..., V\] of at least one"):
        acceptance_probability(np.array(target), np.array(draft), 0)


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [-0.5, 1.5], [0.0, 0.0], 1.0])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_bad_dense_distributions(side, bad):
    good = np.array([0.5, 0.5])
    pair = {"target": good, "draft": good, side: bad}
    with pytest.raises(ValueError, match=rf"^\[distributions\] {side}: expected"):
        residual_distribution(**pair)

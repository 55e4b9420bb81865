"""``exactspec.integrations.mtplx`` against ``mtplx.sampling``: the same but for what it lists."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import asdict
from importlib.util import find_spec

import numpy as np
import pytest
from exactspec.integrations import mtplx as ours

# Their packages are for macOS and Linux with Python 3.11 or newer.
needs_mtplx = pytest.mark.skipif(find_spec("mtplx") is None, reason="mtplx is not installed")
SIZE = 40
ROUNDING = 1e-15  # of a float64 probability that was renormalised once more or less


@pytest.fixture
def theirs():
    from mtplx import sampling

    return sampling


def random_row(rng, size=SIZE):
    """A distribution: some ids have no mass, some have equal mass."""
    weights = rng.integers(0, 6, size) * rng.choice([1.0, 0.1, 1 / 3])
    weights[rng.integers(size)] += 1
    return weights / weights.sum()


def random_support(rng):
    ids = rng.permutation(SIZE)[: rng.integers(1, 12)]
    return ids, random_row(rng, len(ids))


def random_pairs(theirs, count):
    """Target and draft, each of them sparse or dense, in both packages; and a draft token."""
    rng = np.random.default_rng(0)
    for number in range(count):
        sides = []
        for is_sparse in (number & 1, number & 2):
            if is_sparse:
                support = random_support(rng)
                sides.append([x.SparseDistribution(*support, SIZE) for x in (ours, theirs)])
            else:
                row = random_row(rng)
                if number % 16 == 1 and len(sides) == 1:
                    row = np.zeros(SIZE)  # a draft without mass
                sides.append([row, row])
        if number % 20 == 3:
            sides[1] = sides[0]  # they agree: no residual
        yield number, *zip(*sides), int(rng.integers(SIZE))


@needs_mtplx
def test_names_and_signatures(theirs):
    from mtplx import speculative

    public = {
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == theirs.__name__
    }
    public |= {"Distribution", "PENALTY_MIN", "PENALTY_MAX", *speculative.__all__}
    for name in public:
        there, here = getattr(theirs, name), getattr(ours, name)
        if not callable(there) or name == "Distribution":
            continue
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(x).parameters.values()]
            for x in (here, there)
        ]
        assert parameters[0] == parameters[1], name
    assert (ours.PENALTY_MIN, ours.PENALTY_MAX) == (theirs.PENALTY_MIN, theirs.PENALTY_MAX)
    assert issubclass(ours.NonFiniteLogitsError, RuntimeError)
    assert asdict(ours.SamplerConfig()) == asdict(theirs.SamplerConfig())
    fields = ("token_ids", "probs", "vocab_size")
    assert tuple(ours.SparseDistribution.__dataclass_fields__) == fields


@needs_mtplx
def test_acceptance_residual_and_draws_are_theirs(theirs):
    rejected = 0
    for number, (target, draft), (their_target, their_draft), token in random_pairs(theirs, 2000):
        accept = ours.acceptance_probability(target, draft, token)
        assert accept == theirs.acceptance_probability(their_target, their_draft, token)
        here = ours.residual_distribution(target, draft)
        there = theirs.residual_distribution(their_target, their_draft)
        assert isinstance(here, np.ndarray) == isinstance(there, np.ndarray)
        if isinstance(here, np.ndarray):
            np.testing.assert_allclose(here, there, rtol=0, atol=ROUNDING)
        else:
            assert here.token_ids.tolist() == there.token_ids.tolist()
            np.testing.assert_allclose(here.probs, there.probs, rtol=0, atol=ROUNDING)
        one, other = np.random.default_rng(number), np.random.default_rng(number)
        for _ in range(3):  # the generators stay in step
            decision = ours.verify_one_token(target, draft, token, one)
            expected = theirs.verify_one_token(their_target, their_draft, token, other)
            assert asdict(decision) == asdict(expected)
            assert ours.sample_from_distribution(target, one) == (
                theirs.sample_from_distribution(their_target, other)
            )
            rejected += not decision.accepted
    assert rejected > 1000


@needs_mtplx
def test_marginal_is_theirs(theirs):
    for _, (target, draft), (their_target, their_draft), _ in random_pairs(theirs, 100):
        if isinstance(draft, np.ndarray) and not draft.any():
            continue  # listed: NaN there
        here = ours.speculative_output_marginal(target, draft)
        there = theirs.speculative_output_marginal(their_target, their_draft)
        np.testing.assert_allclose(here, there, rtol=0, atol=10 * SIZE * ROUNDING)


@needs_mtplx
def test_distributions_of_logits_are_theirs(theirs):
    rng = np.random.default_rng(1)
    for _ in range(500):
        # Of few values: with ties.
        logits = rng.integers(-8, 8, SIZE) * rng.choice([0.25, 0.37])
        logits[rng.random(SIZE) < 0.1] = -np.inf
        logits = logits.astype(rng.choice(["float32", "float64"]))
        parameters = {
            "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, -1.0]),
            "top_p": rng.choice([-0.5, 0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0]),
            "top_k": int(rng.choice([-1, 0, 1, 5, 39, 40, 99])),
            "presence_penalty": rng.choice([0.0, 0.0, 1.5, -3.0]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.25, 5.0]),
        }
        seen = {"token_counts": dict(zip(rng.permutation(SIZE)[:9].tolist(), [0, *range(1, 9)]))}
        seen["penalty_overlay"] = {3: 2.5, 8: 0.5} if rng.random() < 0.3 else None
        here = ours.distribution_from_logits(logits, ours.SamplerConfig(**parameters), **seen)
        there = theirs.distribution_from_logits(logits, theirs.SamplerConfig(**parameters), **seen)
        # With penalties a sum is added up in another order.
        np.testing.assert_allclose(here, there, rtol=1e-14, atol=0)
        np.testing.assert_array_equal(
            ours.deterministic_top_k_order(logits, parameters["top_k"]),
            theirs.deterministic_top_k_order(logits, parameters["top_k"]),
        )
        filtered = [
            x.apply_top_k_top_p(here, parameters["top_k"], parameters["top_p"])
            for x in (ours, theirs)
        ]
        np.testing.assert_array_equal(*filtered)
        untouched = [x.apply_penalties(logits, {}, 1.0, 1.0) is logits for x in (ours, theirs)]
        assert untouched == [True, True]


class Zero:
    """A generator whose coin is the least there is."""

    def random(self):
        return 0.0

    def choice(self, ids, p):
        return np.random.default_rng(0).choice(ids, p=p)


def value_of(call, package):
    try:
        result = call(package)
    except Exception as error:
        return type(error).__name__
    return result.tolist() if isinstance(result, np.ndarray) else result


NAN, INF = float("nan"), float("inf")
EVEN = np.array([0.5, 0.5])
DIFFERENCES = {
    "strict coin": (
        lambda x: x.verify_one_token(np.array([1.0, 0]), np.array([0, 1.0]), 1, Zero()).accepted,
        False,
        True,
    ),
    "placeholder": (
        lambda x: x.acceptance_probability(np.array([0.2, 0.8]), np.array([0.8, 0.2]), -1),
        0.0,
        1.0,
    ),
    "id beyond both widths": (
        lambda x: x.acceptance_probability(np.array([0.2, 0.8]), np.array([0.8, 0.2]), 5),
        0.0,
        "IndexError",
    ),
    "repeated ids": (
        lambda x: x.SparseDistribution(np.array([4, 4]), EVEN, 6).probability(4),
        1.0,
        0.5,
    ),
    "repeated ids, dense": (
        lambda x: x.SparseDistribution(np.array([1, 1]), EVEN, 2).to_dense(),
        [0.0, 1.0],
        [0.0, 0.5],
    ),
    "id outside the vocabulary": (
        lambda x: x.SparseDistribution(np.array([3]), np.array([1.0]), 3).vocab_size,
        "ValueError",
        3,
    ),
    "NaN, sparse": (
        lambda x: x.SparseDistribution(np.arange(2), np.array([NAN, 1.0]), 2).probs,
        "NonFiniteLogitsError",
        [0.0, 1.0],
    ),
    "infinite, sparse": (
        lambda x: x.SparseDistribution(np.arange(2), np.array([INF, 1.0]), 2).probs,
        "NonFiniteLogitsError",
        [0.0, 1.0],
    ),
    "NaN, residual": (
        lambda x: x.residual_distribution(np.array([NAN, 1.0]), EVEN),
        "NonFiniteLogitsError",
        [0.0, 1.0],
    ),
    "NaN, acceptance": (
        lambda x: x.acceptance_probability(np.array([NAN, 1.0]), EVEN, 0),
        "NonFiniteLogitsError",
        1.0,
    ),
    "negative": (
        lambda x: x.residual_distribution(EVEN, np.array([-0.5, 1.5])),
        "ValueError",
        [1.0, 0.0],
    ),
    "negative, acceptance": (
        lambda x: x.acceptance_probability(EVEN, np.array([-0.5, 1.5]), 0),
        "ValueError",
        1.0,
    ),
    "greedy NaN": (
        lambda x: x.softmax(np.array([NAN, 1.0]), 0),
        "NonFiniteLogitsError",
        [1.0, 0.0],
    ),
    "greedy without a finite logit": (
        lambda x: x.softmax(np.array([-INF, -INF]), 0),
        "NonFiniteLogitsError",
        [1.0, 0.0],
    ),
    "two widths": (
        lambda x: x.residual_distribution(EVEN, np.array([0.25, 0.25, 0.5])),
        [0.5, 0.5],
        "ValueError",
    ),
    "penalty on an id outside": (
        lambda x: x.apply_penalties(np.zeros(4), {-1: 1}, 1.0),
        "ValueError",
        [0.0, 0.0, 0.0, -1.0],
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_on_purpose(name):
    call, here, _ = DIFFERENCES[name]
    assert value_of(call, ours) == here


@needs_mtplx
@pytest.mark.parametrize("name", DIFFERENCES)
def test_theirs_differs_as_listed(name, theirs):
    call, here, there = DIFFERENCES[name]
    assert value_of(call, theirs) == there != here


@needs_mtplx
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # theirs divides by 0
def test_marginal_of_a_draft_without_mass(theirs):
    assert np.isnan(theirs.speculative_output_marginal(EVEN, np.zeros(2))).all()
    with pytest.raises(ValueError, match="draft: expected a positive sum"):
        ours.speculative_output_marginal(EVEN, np.zeros(2))


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda x: x.SparseDistribution(np.array([], int), np.array([]), 3), "ValueError"),
        (lambda x: x.SparseDistribution(np.arange(2), np.ones(1), 3), "ValueError"),
        (lambda x: x.SparseDistribution(np.arange(2), np.array([2.0, -1.0]), 3), "ValueError"),
        (lambda x: x.SparseDistribution(np.arange(2), np.zeros(2), 3), "NonFiniteLogitsError"),
        (lambda x: x.softmax(np.array([NAN, 1.0])), "NonFiniteLogitsError"),
        (lambda x: x.softmax(np.array([-INF, -INF])), "NonFiniteLogitsError"),
        (lambda x: x.residual_distribution(np.zeros(2), EVEN), "ValueError"),
        (lambda x: x.apply_top_p_top_k(np.ones((2, 2))), "ValueError"),
        (lambda x: x.deterministic_top_k_order(np.ones((2, 2)), 1), "ValueError"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_errors_are_theirs(call, error):
    assert value_of(call, ours) == error
    if find_spec("mtplx"):
        from mtplx import sampling

        assert value_of(call, sampling) == error


def test_a_draw_keeps_the_order_of_ids():
    ids, probs = np.array([7, 2, 5]), np.array([0.2, 0.3, 0.5])
    distribution = ours.SparseDistribution(ids, probs, 9)
    assert distribution.token_ids.tolist() == ids.tolist()
    draws = [
        ours.sample_from_distribution(distribution, np.random.default_rng(seed))
        for seed in range(50)
    ]
    expected = [np.random.default_rng(seed).choice(ids, p=probs) for seed in range(50)]
    assert draws == expected and set(draws) == {2, 5, 7}


def test_the_error_tells_its_counts_and_can_be_pickled():
    error = ours.non_finite_logits_error(np.array([NAN, INF, 0.0]), "a test")
    assert str(error) == "non-finite logits in a test (nan=1, inf=1, vocab=3)"
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and type(copy) is type(error)
    assert (copy.nan_count, copy.inf_count, copy.vocab_size) == (1, 1, 3)


def test_an_id_of_any_size_that_is_no_token_has_no_probability():
    row, sparse = np.array([0.5, 0.5]), ours.SparseDistribution([0, 1], [0.5, 0.5], 2)
    for side in (row, sparse):
        assert ours.acceptance_probability(side, side, 10**30) == 0.0

"""``sample``: replayed against the float64 oracle, and single facts."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import oracle
import pytest
from exactspec import Sampling
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p
from strategies import replay, sample_problems
from tolerances import LOGPROB, TIE_SHARE


def kept(row_stats: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The ids ``[V]`` of finite logit that a row's cutoff keeps."""
    _, _, cutoff, cutoff_id = row_stats
    ids = np.arange(len(logits))
    before = (logits > cutoff) | ((logits == cutoff) & (ids <= cutoff_id))
    return before & (logits > -np.inf)


def check_replay(backend, problem) -> tuple[int, int]:
    """Everything the operation returns against the oracle; how many rows, and ties, it saw."""
    before = [np.array(buffer.astype(mx.float32)) for buffer in problem.buffers()]
    result = backend.sample(**problem.arguments())
    wanted = oracle.sample(**problem.law)

    clear = ~wanted.ties
    np.testing.assert_array_equal(np.array(result.tokens)[clear], wanted.tokens[clear])
    np.testing.assert_array_equal(np.array(result.status)[clear], wanted.status[clear])
    sure = clear & ~wanted.doubtful
    assert (result.logprobs is None) == (wanted.logprobs is None)
    if wanted.logprobs is not None:
        np.testing.assert_allclose(
            np.array(result.logprobs)[sure], wanted.logprobs[sure], rtol=LOGPROB, atol=LOGPROB
        )
    row_stats = np.array(result.row_stats)
    np.testing.assert_array_equal(row_stats[:, 0], wanted.row_stats[:, 0].astype(np.float32))
    np.testing.assert_allclose(
        row_stats[sure, 1], wanted.row_stats[sure, 1], rtol=LOGPROB, atol=LOGPROB
    )
    for b in np.flatnonzero(~wanted.doubtful):
        if np.isnan(wanted.row_stats[b]).any():
            assert np.isnan(row_stats[b]).all()
            continue
        bitmask = problem.law.get("token_bitmask")
        logits = oracle.masked(problem.law["logits"][b], None if bitmask is None else bitmask[b])
        np.testing.assert_array_equal(
            kept(row_stats[b], logits), kept(wanted.row_stats[b].astype(np.float32), logits)
        )
    for buffer, values in zip(problem.buffers(), before):  # inputs are never written to
        np.testing.assert_array_equal(np.array(buffer.astype(mx.float32)), values)
    return len(clear), int(wanted.ties.sum())


# Order, probabilities, temperature, top_k, top_p, min_p, and what is left. Weights relative to the
# largest: of FOUR (1, .75, .5, .25), at temperature 2 (1, .866, .707, .5); of FIVE
# (1, .4, .3, .2, .1), at temperature 2 (1, .632, .548, .447, .316).
FOUR, FIVE = (0.4, 0.3, 0.2, 0.1), (0.5, 0.2, 0.15, 0.1, 0.05)
ORDERED = [
    ("temperature_first", FOUR, 2.0, 2, 0.55, 0.0, (0.536, 0.464, 0, 0)),
    ("temperature_last", FOUR, 2.0, 2, 0.55, 0.0, (0.536, 0.464, 0, 0)),
    ("sequential", FOUR, 2.0, 2, 0.55, 0.0, (0.536, 0.464, 0, 0)),
    ("sequential", FOUR, 2.0, 2, 0.53, 0.0, (1, 0, 0, 0)),
    # Untempered, the first of two has .571 of their mass.
    ("sequential_untempered", FOUR, 2.0, 2, 0.55, 0.0, (1, 0, 0, 0)),
    ("sequential_untempered", FOUR, 2.0, 2, 0.58, 0.0, (0.536, 0.464, 0, 0)),
    ("sequential_untempered", FOUR, 2.0, 0, 1.0, 0.3, (0.389, 0.337, 0.275, 0)),
    ("sequential_untempered", FOUR, 0.5, 3, 0.99, 0.3, (0.552, 0.310, 0.138, 0)),
    # top_p is not measured on what min_p leaves: .5 is less than .55 of all.
    ("sequential_untempered", FIVE, 1.0, 0, 0.55, 0.35, (0.714, 0.286, 0, 0, 0)),
    ("temperature_first", FIVE, 1.0, 0, 0.8, 0.25, (0.588, 0.235, 0.176, 0, 0)),
    ("min_p_first", FIVE, 1.0, 0, 0.8, 0.25, (0.714, 0.286, 0, 0, 0)),
    ("min_p_first", FIVE, 1.0, 4, 0.8, 0.25, (0.714, 0.286, 0, 0, 0)),
    ("min_p_first", FIVE, 1.0, 2, 0.75, 0.25, (0.714, 0.286, 0, 0, 0)),
    ("min_p_first", FIVE, 1.0, 2, 0.7, 0.25, (1, 0, 0, 0, 0)),
    ("min_p_first", FIVE, 1.0, 0, 0.7, 0.25, (0.714, 0.286, 0, 0, 0)),
    # min_p and top_p both tempered: .459, .290, .251 of three.
    ("min_p_first", FIVE, 2.0, 0, 0.8, 0.5, (0.459, 0.290, 0.251, 0, 0)),
    ("min_p_first", FIVE, 2.0, 0, 0.7, 0.5, (0.613, 0.387, 0, 0, 0)),
    # Without min_p as "sequential", without both as "temperature_first".
    ("min_p_first", FOUR, 2.0, 2, 0.53, 0.0, (1, 0, 0, 0)),
    ("min_p_first", FOUR, 2.0, 0, 0.53, 0.0, (0.536, 0.464, 0, 0)),
    ("min_p_first", FIVE, 1.0, 3, 1.0, 0.35, (0.714, 0.286, 0, 0, 0)),
]


@pytest.mark.parametrize("order, probs, temperature, top_k, top_p, min_p, left", ORDERED)
def test_filter_orders(backend, order, probs, temperature, top_k, top_p, min_p, left):
    """Known distributions; a row of temperature 0 beside it keeps the largest alone."""
    # Ids in another order than their probabilities.
    ids = np.random.default_rng(len(probs)).permutation(len(probs))
    logits = np.empty((2, len(probs)), np.float32)
    logits[:, ids] = np.log(np.array(probs))
    arrays = Sampling(
        mx.array([temperature, 0.0]), mx.array([top_k] * 2), top_p, mx.array([min_p] * 2), order
    )
    for sampling in (Sampling(temperature, top_k, top_p, min_p, order), arrays):
        result = backend.sample(
            mx.array(logits), sampling, uniforms=mx.zeros((2, 2)), logprobs="filtered"
        )
        rows = []
        for row, stats, t in zip(logits, np.array(result.row_stats), (temperature, 1.0)):
            weights = np.exp((row - stats[0]) / t - stats[1])
            rows.append((weights * kept(stats, row))[ids])
        np.testing.assert_allclose(rows[0], left, atol=6e-4)
        tokens = result.tokens.tolist()
        np.testing.assert_allclose(
            np.exp(result.logprobs[0].item()), rows[0][ids.tolist().index(tokens[0])], rtol=1e-5
        )
    assert rows[1].tolist() == [1.0] + [0.0] * (len(probs) - 1) and tokens[1] == ids[0]


def test_order_of_mlx_lm(backend):
    """``temperature_last`` keeps what mlx-lm's filters keep, where no two logits are equal."""
    logits = 3 * mx.random.normal((6, 1000), key=mx.random.key(7))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for top_k, top_p, min_p in ((0, 0.9, 0.0), (0, 0.5, 0.02), (20, 0.8, 0.0), (5, 0.95, 0.1)):
        theirs = apply_top_p(logprobs, top_p)
        theirs = apply_min_p(theirs, min_p) if min_p else theirs
        theirs = apply_top_k(theirs, top_k) if top_k else theirs
        sampling = Sampling(0.7, top_k, top_p, min_p, "temperature_last")
        row_stats = backend.sample(logits, sampling, uniforms=mx.zeros((6, 2))).row_stats
        for b in range(6):
            ours = kept(np.array(row_stats[b]), np.array(logits[b]))
            np.testing.assert_array_equal(ours, np.array(theirs[b]) > -np.inf)


def test_mlx_lm_keeps_ties_at_a_nucleus(backend):
    """What docs/algorithm.md says differs."""
    logprobs = mx.log(mx.array([[0.4, 0.2, 0.2, 0.2]]))
    assert (apply_top_p(logprobs, 0.5) > -mx.inf).sum().item() == 4
    assert (apply_top_k(logprobs, 2) > -mx.inf).sum().item() == 2
    for filters in (Sampling(top_p=0.5), Sampling(top_k=2)):
        result = backend.sample(logprobs, filters, uniforms=mx.zeros((1, 2)))
        ours = kept(np.array(result.row_stats[0]), np.array(logprobs[0]))
        assert ours.tolist() == [True, True, False, False]


@pytest.mark.quick(num_problems=[60])
@pytest.mark.parametrize("num_problems", [60, 300])
@pytest.mark.parametrize("rule", ["independent", "coupled"])
def test_replay(backend, figure, rule, num_problems):
    """The same noise gives the oracle's ids, on all kinds of input."""
    check = partial(check_replay, backend)
    ties = replay(sample_problems(rule), check, num_problems)
    figure("share of ties", ties)
    assert ties <= TIE_SHARE


def test_without_the_batch_axis(backend):
    logits = mx.random.normal((3, 40), key=mx.random.key(0))
    uniforms = mx.random.uniform(shape=(3, 2), key=mx.random.key(1))
    bitmask = mx.full((3, 2), 0x5555555, mx.int32)
    batch = backend.sample(logits, uniforms=uniforms, token_bitmask=bitmask, logprobs="raw")
    for b in range(3):
        row = backend.sample(
            logits[b], uniforms=uniforms[b], token_bitmask=bitmask[b], logprobs="raw"
        )
        assert row.tokens.shape == row.status.shape == row.logprobs.shape == ()
        for got, wanted in zip(row, batch):
            np.testing.assert_array_equal(np.array(got), np.array(wanted)[b])


def test_result_dtypes(backend):
    result = backend.sample(mx.zeros((3, 5), mx.float16), logprobs="filtered")
    assert [x.dtype for x in result] == [mx.int32, mx.uint32, mx.float32, mx.float32]
    assert [x.shape for x in result] == [(3,), (3,), (3,), (3, 4)]


def test_row_stats(backend):
    """Largest logit; log of the kept weights' sum; a logit and id that cut after the last kept."""
    logits = mx.log(mx.array([[0.1, 0.4, 0.1, 0.3, 0.1]] * 4))
    temperature, top_k = mx.array([1.0, 1.0, 0.0, -1.0]), mx.array([4, 2, 4, 4])
    result = backend.sample(logits, Sampling(temperature, top_k), uniforms=mx.zeros((4, 2)))
    row_stats = np.array(result.row_stats)
    top = np.log(np.float32(0.4))
    wanted = [[top, np.log(0.9 / 0.4)], [top, np.log(0.7 / 0.4)], [top, 0], [np.nan] * 2]
    np.testing.assert_allclose(row_stats[:, :2], wanted, rtol=LOGPROB, atol=LOGPROB)
    sets = [kept(row, np.array(logits[0])).nonzero()[0].tolist() for row in row_stats[:3]]
    assert sets == [[0, 1, 2, 3], [1, 3], [1]]
    assert row_stats[2, 2:].tolist() == [top, 1]
    assert np.isnan(row_stats[3]).all()
    assert result.status.tolist() == [0, 0, 0, 32]
    assert result.tokens.tolist() == [0, 1, 1, -1]


def test_ties_are_broken_by_id(backend):
    """-0.0 equals +0.0; the lowest id comes first."""
    logits = mx.array([[-1.0, -0.0, 0.0, 0.0, -0.0]])
    largest = mx.full((1, 2), 1 - 2.0**-24)
    assert backend.sample(logits, Sampling(temperature=0), uniforms=largest).tokens.item() == 1
    assert backend.sample(logits, Sampling(top_k=2), uniforms=largest).tokens.item() == 2
    assert backend.sample(logits, Sampling(top_k=3), uniforms=largest).tokens.item() == 3


def test_two_levels(backend):
    """Where there are several blocks of 2048, the first uniform chooses among them."""
    logits = mx.full((1, 2048 * 3), -mx.inf)
    logits[0, mx.array([5, 2100, 2200, 5000])] = 0.0
    for pair, token in (
        ((0.24, 0.9), 5),
        ((0.26, 0.49), 2100),
        ((0.26, 0.51), 2200),
        ((0.74, 0.0), 2100),
        ((0.76, 0.0), 5000),
    ):
        assert backend.sample(logits, uniforms=mx.array([pair])).tokens.item() == token


def test_a_block_without_weight_is_never_chosen(backend):
    """Not at u = 0 either, where all its weights are so small that they may count as 0."""
    logits = mx.full((2, 3 * 2048), -100.0)
    logits[:, 2048:4096] = 0.0
    largest = 1 - 2.0**-24
    uniforms = mx.array([[0.0, 0.0], [largest, largest]])
    for sampling in (Sampling(), Sampling(top_p=0.999)):
        result = backend.sample(logits, sampling, uniforms=uniforms)
        assert result.tokens[0].item() in (0, 2048)  # exp(-100) counts as 0, or as what it is
        assert 2048 < result.tokens[1].item() < 4096
        assert result.status.tolist() == [0, 0]


def test_one_block_ignores_the_first_uniform(backend):
    logits = mx.random.normal((200, 2048), key=mx.random.key(2))
    uniforms = mx.random.uniform(shape=(200, 2), key=mx.random.key(3))
    other = mx.stack([mx.random.uniform(shape=(200,), key=mx.random.key(4)), uniforms[:, 1]], 1)
    tokens = [backend.sample(logits, uniforms=u).tokens.tolist() for u in (uniforms, other)]
    assert tokens[0] == tokens[1]


def test_keys_stand_for_mlx_uniforms(backend):
    logits = mx.random.normal((5, 6000), key=mx.random.key(5))
    keys = mx.random.split(mx.random.key(6), 5)
    noise = mx.stack([mx.random.uniform(shape=(256,), key=key)[254:] for key in keys])
    keyed = backend.sample(logits, keys=keys).tokens.tolist()
    assert keyed == backend.sample(logits, uniforms=noise).tokens.tolist()


def test_seed(backend):
    logits = mx.zeros((4, 1000))

    def draws(seed):
        mx.random.seed(seed)
        return [backend.sample(logits).tokens.tolist() for _ in range(2)]

    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert first[0] != first[1]


def test_one_bad_row_among_good_ones(backend):
    logits = mx.zeros((4, 3))
    logits[0, 1] = mx.nan
    logits[1, 1] = mx.inf
    logits[2] = -mx.inf
    result = backend.sample(logits, uniforms=mx.full((4, 2), 0.5), logprobs="raw")
    assert result.tokens.tolist() == [-1, -1, -1, 1]
    assert result.status.tolist() == [1, 1, 1, 0]
    assert np.isnan(np.array(result.logprobs)).tolist() == [True, True, True, False]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.0, 1.5, -0.25])
def test_bad_uniform(backend, bad):
    """Either of the pair, and at temperature 0 as well."""
    uniforms = mx.array([[0.5, 0.5], [bad, 0.5], [0.5, bad], [0.5, 0.5]])
    for temperature in (1.0, 0.0):
        sampling = Sampling(temperature)
        result = backend.sample(mx.zeros((4, 3)), sampling, uniforms=uniforms, logprobs="raw")
        assert result.status.tolist() == [0, 32, 32, 0]
        assert (np.array(result.tokens) < 0).tolist() == [False, True, True, False]
        assert np.isnan(np.array(result.logprobs)).tolist() == [False, True, True, False]
        no_stats = np.isnan(np.array(result.row_stats))
        assert no_stats.tolist() == [[bad] * 4 for bad in (False, True, True, False)]


@pytest.mark.parametrize("field", ["top_p", "min_p"])
@pytest.mark.parametrize("bad", [np.nan, 2.0, -1.0])
def test_fraction_out_of_range_in_an_array(backend, field, bad):
    sampling = Sampling(**{field: mx.array([bad, 0.0, 1.0])})
    result = backend.sample(mx.zeros((3, 4)), sampling, uniforms=mx.full((3, 2), 0.6))
    assert result.status.tolist() == [32, 0, 0] and result.tokens[0].item() == -1


def test_tail_probabilities_are_not_floored(backend):
    """A block of mass 1e-9 is drawn from in proportion: u2 alone chooses inside a block."""
    logits = mx.zeros((1, 4096))
    logits[0, 2048:] = -40.0
    result = backend.sample(logits, uniforms=mx.array([[1 - 2.0**-24, 0.25]]))
    assert result.tokens.item() == 512


@pytest.mark.parametrize("B", [0, 1])
def test_empty(backend, B):
    result = backend.sample(mx.zeros((B, 1)))
    assert result.tokens.tolist() == [0] * B and result.row_stats.shape == (B, 4)


def test_top_p_is_strict(backend):
    """A token whose preceding mass equals top_p does not stay; the sums here are exact."""
    logits = mx.zeros((1, 4))
    largest = mx.full((1, 2), 1 - 2.0**-24)
    for top_p, last in ((0.25, 0), (0.5, 1), (0.75, 2), (0.7500001, 3)):
        result = backend.sample(logits, Sampling(top_p=top_p), uniforms=largest)
        assert result.tokens.item() == last

"""``verify_draft`` on cases with known results, and replayed against the float64 oracle."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle
import pytest
from exactspec import Sampling
from exactspec.cases import CASES, mismatches, mlx_arguments, numpy_arguments
from strategies import RULES, replay, verify_problems
from tolerances import LOGPROB, STATS, TIE_SHARE

# Cases


def case_ids(case: dict) -> str:
    return case["name"]


@pytest.mark.parametrize("case", CASES, ids=case_ids)
def test_case(backend, case):
    result = backend.verify_draft(**mlx_arguments(case), rule=case.get("rule", "token"))
    expect = case["expect"]
    assert expect and mismatches(expect, result.tokens, result.num_accepted, result.status) == []


@pytest.mark.parametrize("case", CASES, ids=case_ids)
def test_case_on_the_oracle(case):
    arguments = numpy_arguments(case)
    for name in ("sampling", "draft_sampling"):
        if name in arguments:
            arguments[name] = oracle.Sampling(**arguments[name])
    result = oracle.verify_draft(**arguments, rule=case.get("rule", "token"))
    expect = case["expect"]
    assert expect and mismatches(expect, result.tokens, result.num_accepted, result.status) == []


# Replayed noise


def close(result: mx.array, wanted: np.ndarray, tolerance: float, skipped: np.ndarray) -> None:
    """Equal up to ``tolerance``, NaN where NaN is wanted; ``skipped`` entries may be anything."""
    result = np.where(skipped, wanted, np.array(result))
    np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


def row_stats_of(backend, arguments: dict) -> mx.array:
    """``draft_stats [B, K, 4]``, as the draft steps would have left them."""
    B, K, _ = arguments["draft_logits"].shape
    sampling = arguments.get("draft_sampling", arguments["sampling"])
    rows = [
        backend.sample(arguments["draft_logits"][:, i], sampling, uniforms=mx.zeros((B, 2)))
        for i in range(K)
    ]
    return mx.stack([row.row_stats for row in rows], axis=1) if rows else mx.zeros((B, 0, 4))


def check_replay(backend, problem) -> tuple[int, int]:
    """Everything the operation returns against the oracle; how many sequences, and ties, it saw."""
    before = [np.array(buffer.astype(mx.float32)) for buffer in problem.buffers()]
    arguments = problem.arguments()
    if problem.hand_over:
        arguments["draft_stats"] = row_stats_of(backend, arguments)
    result = backend.verify_draft(**arguments)
    wanted = oracle.verify_draft(**problem.law)

    clear = ~wanted.ties
    np.testing.assert_array_equal(np.array(result.tokens)[clear], wanted.tokens[clear])
    np.testing.assert_array_equal(np.array(result.num_accepted)[clear], wanted.num_accepted[clear])
    np.testing.assert_array_equal(np.array(result.status)[clear], wanted.status[clear])
    assert result.exact is isinstance(problem.law["rule"], str)
    unclear = wanted.ties[:, None] | wanted.doubtful
    assert (result.logprobs is None) == (wanted.logprobs is None)
    if wanted.logprobs is not None:
        close(result.logprobs, wanted.logprobs, LOGPROB, unclear)
    assert (result.stats is None) == (wanted.stats is None)
    if wanted.stats is not None:
        for name, values in wanted.stats._asdict().items():
            close(getattr(result.stats, name), values, STATS, wanted.doubtful[:, :-1])
    for buffer, values in zip(problem.buffers(), before):  # inputs are never written to
        np.testing.assert_array_equal(np.array(buffer.astype(mx.float32)), values)
    return len(clear), int(wanted.ties.sum())


@pytest.mark.quick(num_problems=[40])
@pytest.mark.parametrize("num_problems", [40, 300])
@pytest.mark.parametrize("rule", RULES)
def test_replay(backend, figure, rule, num_problems):
    """The same noise gives the oracle's ids, on all kinds of input."""
    if backend.simulated:
        num_problems = min(num_problems, 100)
    ties = replay(
        verify_problems(rule), lambda problem: check_replay(backend, problem), num_problems
    )
    figure("share of ties", ties)
    assert ties <= TIE_SHARE


# Single facts


def assert_same_bits(got, wanted) -> None:
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.array(x), np.array(y))


def logs(probs) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(np.array(probs)).astype(np.float32))


def test_without_the_batch_axis(backend):
    rng = np.random.default_rng(0)
    given = {
        "target_logits": rng.normal(size=(3, 4, 6)).astype(np.float32),
        "draft_tokens": rng.integers(0, 6, size=(3, 3)).astype(np.int32),
        "draft_logits": rng.normal(size=(3, 3, 6)).astype(np.float32),
        "draft_lengths": np.array([3, 2, 0], np.int32),
        "uniforms": rng.random((3, 5)).astype(np.float32),
        "token_bitmask": np.full((3, 4, 1), 0b111101, np.int32),
    }
    options = {"logprobs": "raw", "stats": True}
    batch = backend.verify_draft(**{k: mx.array(v) for k, v in given.items()}, **options)
    for b in range(3):
        row = backend.verify_draft(**{k: mx.array(v[b]) for k, v in given.items()}, **options)
        assert row.tokens.shape == (4,) and row.num_accepted.shape == row.status.shape == ()
        assert row.logprobs.shape == (4,) and row.stats.overlap.shape == (3,)
        for got, wanted in zip((*row[:4], *row.stats), (*batch[:4], *batch.stats)):
            np.testing.assert_array_equal(np.array(got), np.array(wanted)[b])


def test_result_dtypes_and_shapes(backend):
    result = backend.verify_draft(
        mx.zeros((2, 4, 5), mx.bfloat16), mx.zeros((2, 3), mx.int32), logprobs="raw", stats=True
    )
    assert result.tokens.shape == (2, 4) and result.tokens.dtype == mx.int32
    assert result.num_accepted.shape == (2,) and result.num_accepted.dtype == mx.int32
    assert result.status.shape == (2,) and result.status.dtype == mx.uint32
    assert result.logprobs.shape == (2, 4) and result.logprobs.dtype == mx.float32
    for values in result.stats:
        assert values.shape == (2, 3) and values.dtype == mx.float32


def test_unsigned_draft_tokens(backend):
    arguments = {
        "target_logits": logs([[[0.2, 0.8], [0.5, 0.5]]]),
        "uniforms": mx.full((1, 3), 0.7),
    }
    for token in (0, 1):
        signed, unsigned = (
            backend.verify_draft(draft_tokens=mx.array([[token]], dtype), **arguments)
            for dtype in (mx.int32, mx.uint32)
        )
        assert signed.tokens.tolist() == unsigned.tokens.tolist()


def test_tokens_that_end_the_draft(backend):
    """Below -1, unlisted in the draft's vocabulary, or beyond the target's when one-hot."""
    target = logs([[[0.25, 0.75, 0], [1, 0, 0]]])
    uniforms = mx.array([[0.0, 0.5, 0.1]])
    draft = mx.zeros((1, 1, 2))
    for token, options in (
        (-2, {}),
        (-2, {"draft_logits": draft}),
        (-1, {"draft_lengths": mx.array([1])}),
        (3, {}),
        (2, {"draft_logits": draft}),
        (1, {"draft_logits": draft, "draft_vocab": mx.array([0, 2])}),
        (3, {"draft_ids": mx.array([[[0, 1]]]), "draft_probs": mx.array([[[0.5, 0.5]]])}),
    ):
        tokens = mx.array([[token]])
        result = backend.verify_draft(target, tokens, uniforms=uniforms, stats=True, **options)
        assert result.num_accepted.tolist() == [0], (token, options)
        assert result.tokens.tolist() == [[0, -1]], (token, options)
        assert result.status.tolist() == [4], (token, options)
        assert all(np.isnan(values).all() for values in result.stats)


def test_unused_slot_is_no_fault(backend):
    target = logs([[[0.25, 0.75], [1, 0]]])
    result = backend.verify_draft(target, mx.array([[-1]]), uniforms=mx.array([[0.0, 0.5, 0.1]]))
    assert result.tokens.tolist() == [[0, -1]] and result.status.tolist() == [0]


def test_lengths_are_clamped(backend):
    target = logs([[[0, 1], [1, 0]]] * 2)
    tokens, lengths = mx.array([[1], [1]]), mx.array([-3, 2])
    result = backend.verify_draft(
        target, tokens, draft_lengths=lengths, uniforms=mx.full((2, 3), 0.5)
    )
    assert result.num_accepted.tolist() == [0, 1]
    assert result.tokens.tolist() == [[1, -1], [1, 0]]
    assert result.status.tolist() == [4, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.1, 0.6])
def test_bad_sparse_probabilities(backend, bad):
    """NaN, infinite, negative, or summing above 1.001."""
    result = backend.verify_draft(
        logs([[[0.5, 0.5], [1, 0]]] * 2),
        mx.array([[0], [0]]),
        draft_ids=mx.array([[[0, 1]]] * 2),
        draft_probs=mx.array([[[0.5, bad]], [[0.5, 0.5009]]]),
        uniforms=mx.full((2, 3), 0.5),
    )
    assert result.status.tolist() == [2, 0]
    assert result.num_accepted.tolist() == [0, 1]
    assert result.tokens.tolist() == [[-1, -1], [0, 0]]


def test_nan_draft_stats(backend):
    """A NaN in a slot that is reached stops there; in one that is not, it is not read."""
    target, tokens = mx.zeros((3, 3, 2)), mx.zeros((3, 2), mx.int32)
    target[2, 0, 0] = -mx.inf  # rejects slot 0
    draft = mx.zeros((3, 2, 2))
    stats = mx.tile(mx.array([0.0, np.log(2), 0.0, 1.0]), (3, 2, 1))
    stats[0, 1, 1] = stats[2, 1, 1] = mx.nan
    result = backend.verify_draft(
        target, tokens, draft_logits=draft, draft_stats=stats, uniforms=mx.full((3, 4), 0.25)
    )
    assert result.status.tolist() == [2, 0, 0]
    assert result.tokens.tolist() == [[0, -1, -1], [0, 0, 0], [1, -1, -1]]


@pytest.mark.parametrize("side", ["sampling", "draft_sampling"])
@pytest.mark.parametrize(
    "field, bad",
    [("temperature", b) for b in (np.nan, np.inf, -np.inf, -1.0)]
    + [(name, b) for name in ("top_p", "min_p") for b in (np.nan, np.inf, -0.1, 1.1, 2.0)],
)
def test_bad_parameter_in_an_array(backend, side, field, bad):
    """It silences its own sequence only."""
    options = {side: Sampling(**{field: mx.array([1.0, bad, 1.0])})}
    result = backend.verify_draft(
        logs([[[0, 1], [1, 0]]] * 3),
        mx.ones((3, 1), mx.int32),
        draft_logits=mx.zeros((3, 1, 2)),
        uniforms=mx.full((3, 3), 0.5),
        logprobs="filtered",
        **options,
    )
    assert result.status.tolist() == [0, 32, 0]
    assert result.num_accepted.tolist() == [1, 0, 1]
    assert result.tokens.tolist() == [[1, 0], [-1, -1], [1, 0]]
    assert np.isnan(np.array(result.logprobs)[1]).all()


BAD_UNIFORMS = [np.nan, 1.0, -(2.0**-149)]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("bad", BAD_UNIFORMS)
def test_bad_uniform(backend, bad, temperature):
    """Wherever it stands in its sequence, used or not, it silences that sequence only."""
    K = 35  # more uniforms than a simdgroup has threads
    target, tokens = mx.zeros((4, K + 1, 2)), mx.zeros((4, K), mx.int32)
    for place in (0, 33, K + 1):
        uniforms = mx.full((4, K + 2), 0.6)  # rejects slot 0
        uniforms[1, place] = bad
        uniforms[3, 0] = -0.0
        result = backend.verify_draft(
            target,
            tokens,
            uniforms=uniforms,
            sampling=Sampling(temperature=temperature),
            logprobs="filtered",
            stats=True,
        )
        assert result.status.tolist() == [0, 32, 0, 0], place
        assert result.tokens[1].tolist() == [-1] * (K + 1)
        assert result.num_accepted[1].item() == 0 and result.tokens[0, 0].item() >= 0
        assert np.isnan(np.array(result.logprobs)[1]).all()
        assert all(np.isnan(np.array(values)[1]).all() for values in result.stats)


def test_largest_and_smallest_uniforms_are_good(backend):
    for value in (0.0, 2.0**-149, 1 - 2.0**-24):
        result = backend.verify_draft(
            mx.zeros((1, 2, 2)), mx.zeros((1, 1), mx.int32), uniforms=mx.full((1, 3), value)
        )
        assert result.status.tolist() == [0]


def test_subnormal_temperature_is_zero(backend):
    target = mx.array([[[0.0, 1e-3], [1e-3, 0.0]]])
    for temperature in (1e-39, mx.array([1e-39])):
        result = backend.verify_draft(
            target,
            mx.array([[1]]),
            sampling=Sampling(temperature=temperature),
            uniforms=mx.full((1, 3), 0.99),
        )
        assert result.tokens.tolist() == [[1, 0]]


def test_greedy_rows_do_not_read_the_draft(backend):
    """At target temperature 0 neither a bad draft row nor a draft probability of 0 matters."""
    target, tokens = mx.array([[[0.0, 1.0], [1.0, 0.0]]]), mx.array([[1]])
    sparse = {"draft_ids": mx.array([[[0]]]), "draft_probs": mx.array([[[1.0]]])}
    for draft in ({"draft_logits": mx.full((1, 1, 2), mx.nan)}, sparse):
        result = backend.verify_draft(target, tokens, sampling=Sampling(temperature=0), **draft)
        assert result.tokens.tolist() == [[1, 0]] and result.status.tolist() == [0]


def test_masked_ids_are_ignored(backend):
    """NaN and +inf under a masked id are no fault."""
    target = mx.array([[[mx.nan, 0.0, mx.inf], [0.0, mx.nan, mx.nan]]])
    bitmask = mx.array([[[0b010], [0b001]]], mx.int32)
    result = backend.verify_draft(
        target, mx.array([[1]]), token_bitmask=bitmask, uniforms=mx.full((1, 3), 0.9)
    )
    assert result.tokens.tolist() == [[1, 0]] and result.status.tolist() == [0]


def test_no_id_is_allowed(backend):
    bitmask = mx.array([[[0b11], [0]]], mx.int32)
    result = backend.verify_draft(
        mx.zeros((1, 2, 2)), mx.array([[1]]), token_bitmask=bitmask, uniforms=mx.zeros((1, 3))
    )
    assert result.tokens.tolist() == [[1, -1]] and result.status.tolist() == [1]


def test_extreme_uniforms_stay_in_the_support(backend):
    """Weight 0 is never drawn: not at u = 0 before the support, nor near u = 1 after it."""
    V = 5000
    support = [7, 2047, 2048, 4097]
    target = mx.full((4, 1, V), -mx.inf)
    for i, token in enumerate(support):
        target[:, 0, token] = -30.0 * i
    largest = 1 - 2.0**-24
    uniforms = mx.array([[a, b] for a in (0.0, largest) for b in (0.0, largest)])
    result = backend.verify_draft(target, mx.zeros((4, 0), mx.int32), uniforms=uniforms)
    # All but 1e-13 of the first block's mass is on its first id, all but 1e-26 in that block.
    assert result.tokens.tolist() == [[7], [7], [7], [7]]
    target[:, 0, support] = 0.0
    result = backend.verify_draft(target, mx.zeros((4, 0), mx.int32), uniforms=uniforms)
    assert result.tokens.tolist() == [[7], [2047], [4097], [4097]]


def test_mass_of_a_large_vocabulary(backend):
    """top_p holds to 1e-5 over 152064 equal weights, where a plain float32 sum is off by 1e-3."""
    V = 152064
    logits = mx.zeros((1, 1, V))
    for top_p in (0.3, 0.7, 0.95):
        uniforms = mx.full((1, 2), 1 - 2.0**-24)
        result = backend.verify_draft(
            logits, mx.zeros((1, 0), mx.int32), sampling=Sampling(top_p=top_p), uniforms=uniforms
        )
        assert abs(result.tokens.item() / V - top_p) <= 1e-5


def test_a_row_alone_and_in_a_batch(backend):
    """The same bits, again and again, alone or among others."""
    B, K, V = 64, 3, 3000
    target, draft = (
        mx.random.normal((B, n, V), key=mx.random.key(n)).astype(mx.bfloat16) for n in (K + 1, K)
    )
    tokens = mx.random.randint(0, V, (B, K), key=mx.random.key(9))
    keys = mx.random.split(mx.random.key(1), B)
    sampling = Sampling(temperature=0.7, top_p=0.9)

    def verify(rows):
        return backend.verify_draft(
            target[rows],
            tokens[rows],
            draft_logits=draft[rows],
            keys=keys[rows],
            sampling=sampling,
            logprobs="filtered",
            stats=True,
        )

    def bits(result):
        return [np.array(x) for x in (*result[:4], *result.stats)]

    whole = bits(verify(slice(None)))
    for values, again in zip(whole, bits(verify(slice(None)))):
        np.testing.assert_array_equal(values, again)
    for b in (0, 17, 63):
        for values, alone in zip(whole, bits(verify(slice(b, b + 1)))):
            np.testing.assert_array_equal(values[b : b + 1], alone)


def test_padding_a_batch_changes_no_row(backend):
    """Neither more slots nor a shorter draft of a neighbour enters a keyed row."""
    V, keys = 50, mx.random.split(mx.random.key(3), 8)
    target = mx.random.normal((8, 3, V), key=mx.random.key(4))
    tokens = mx.random.randint(0, V, (8, 2), key=mx.random.key(5))
    tokens[3, 1] = -1
    short = backend.verify_draft(target, tokens, keys=keys)
    padded_target = mx.concatenate([target, mx.full((8, 2, V), mx.nan)], axis=1)
    padded_tokens = mx.concatenate([tokens, mx.full((8, 2), -1, mx.int32)], axis=1)
    padded = backend.verify_draft(padded_target, padded_tokens, keys=keys)
    assert short.status.tolist() == padded.status.tolist() == [0] * 8
    assert short.tokens.tolist() == padded.tokens[:, :3].tolist()
    assert (padded.tokens[:, 3:] == -1).all()


def test_keys_stand_for_mlx_uniforms(backend):
    V, K, keys = 40, 254, mx.random.split(mx.random.key(6), 4)
    target = mx.random.normal((4, K + 1, V), key=mx.random.key(7))
    tokens = mx.argmax(target[:, :-1], axis=-1).astype(mx.int32)
    sampling = Sampling(temperature=0.1)
    uniforms = mx.stack([mx.random.uniform(shape=(256,), key=key) for key in keys])
    keyed = backend.verify_draft(target, tokens, sampling=sampling, keys=keys)
    replayed = backend.verify_draft(target, tokens, sampling=sampling, uniforms=uniforms)
    assert keyed.num_accepted.max() > 1
    assert keyed.tokens.tolist() == replayed.tokens.tolist()


def test_seed(backend):
    """Without explicit noise ``mx.random`` supplies it."""
    target, tokens = mx.zeros((4, 3, 1000)), mx.zeros((4, 2), mx.int32)

    def draws(seed):
        mx.random.seed(seed)
        results = [backend.verify_draft(target, tokens).tokens for _ in range(2)]
        return [result.tolist() for result in results]

    first = draws(1)
    assert first == draws(1)
    assert first != draws(2)
    assert first[0] != first[1]


def test_statistics_change_no_token(backend):
    V, keys = 60, mx.random.split(mx.random.key(8), 16)
    target, draft = (mx.random.normal((16, n, V), key=mx.random.key(n)) for n in (5, 4))
    tokens = mx.argmax(draft, axis=-1).astype(mx.int32)
    results = [
        backend.verify_draft(target, tokens, draft_logits=draft, keys=keys, stats=stats)
        for stats in (False, True)
    ]
    assert results[0].tokens.tolist() == results[1].tokens.tolist()
    assert results[0].num_accepted.tolist() == results[1].num_accepted.tolist()


@pytest.mark.parametrize("B, K", [(0, 2), (0, 0), (3, 0)])
def test_empty(backend, B, K):
    result = backend.verify_draft(
        mx.zeros((B, K + 1, 4)), mx.zeros((B, K), mx.int32), logprobs="raw", stats=True
    )
    assert result.tokens.shape == (B, K + 1) and result.num_accepted.shape == (B,)
    assert result.logprobs.shape == (B, K + 1) and result.stats.overlap.shape == (B, K)
    assert ((result.tokens >= 0) & (result.tokens < 4)).all()

"""Emitted tokens follow the target, whatever the draft: by enumeration and by sampling."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import oracle
import pytest
import scipy.stats
from backends import BACKENDS
from exactspec import Sampling
from tolerances import CHI_SQUARE_P, TIE

MASK = -np.inf


# Stratified: midpoints of a grid over all uniforms, every possible draft by its probability


class Scenario(NamedTuple):
    """A target and a draft whose later rows depend on the draft tokens before them."""

    num_draft_tokens: int = 1
    vocab_size: int = 5
    draft: str = "dense"
    draft_size: int | None = None  # columns, where they are not the target's ids
    sampling: Sampling = Sampling()
    draft_sampling: Sampling | None = None
    allowed: int | None = None  # bits of the target's allowed ids
    masked_target: tuple[int, ...] = ()
    masked_draft: tuple[int, ...] = ()
    seed: int = 0


SCENARIOS = {
    "dense": Scenario(),
    "dense-2": Scenario(2, vocab_size=4),
    "two-ids": Scenario(2, vocab_size=2),
    "two-ids-3": Scenario(3, vocab_size=2),
    "eight-ids": Scenario(vocab_size=8),
    "sparse": Scenario(draft="sparse"),
    "sparse-2": Scenario(2, vocab_size=4, draft="sparse"),
    "one-hot": Scenario(draft="one_hot"),
    "one-hot-2": Scenario(2, vocab_size=4, draft="one_hot"),
    "cold": Scenario(sampling=Sampling(temperature=0.5)),
    "hot-2": Scenario(2, vocab_size=3, sampling=Sampling(temperature=2.0)),
    "draft-temperature": Scenario(2, vocab_size=3, draft_sampling=Sampling(temperature=0.6)),
    "draft-greedy": Scenario(draft_sampling=Sampling(temperature=0)),
    "draft-untempered": Scenario(sampling=Sampling(temperature=1.7), draft_sampling=Sampling()),
    "top-k": Scenario(vocab_size=8, sampling=Sampling(top_k=3)),
    "top-k-target": Scenario(vocab_size=8, sampling=Sampling(top_k=3), draft_sampling=Sampling()),
    "top-k-draft": Scenario(vocab_size=8, draft_sampling=Sampling(top_k=3)),
    "top-p": Scenario(2, vocab_size=4, sampling=Sampling(top_p=0.8)),
    "top-p-draft": Scenario(2, vocab_size=4, draft_sampling=Sampling(top_p=0.6)),
    "min-p": Scenario(
        vocab_size=8, sampling=Sampling(min_p=0.2), draft_sampling=Sampling(min_p=0.4)
    ),
    "all-filters": Scenario(
        vocab_size=8, sampling=Sampling(temperature=1.5, top_k=5, top_p=0.85, min_p=0.1)
    ),
    "temperature-last": Scenario(
        vocab_size=8, sampling=Sampling(temperature=2.0, top_p=0.7, order="temperature_last")
    ),
    "sequential": Scenario(
        vocab_size=8, sampling=Sampling(top_k=5, top_p=0.7, min_p=0.1, order="sequential")
    ),
    "sequential-untempered": Scenario(
        vocab_size=8, sampling=Sampling(2.0, 5, 0.8, 0.15, order="sequential_untempered")
    ),
    "min-p-first": Scenario(
        vocab_size=8, sampling=Sampling(1.3, 6, 0.8, 0.15, order="min_p_first")
    ),
    "draft-of-another-order": Scenario(
        vocab_size=5,
        sampling=Sampling(1.5, 0, 0.8, 0.2, order="min_p_first"),
        draft_sampling=Sampling(2.0, 3, 0.75, order="sequential_untempered"),
    ),
    "padded": Scenario(vocab_size=3, draft_size=5),
    "padded-2": Scenario(2, vocab_size=3, draft_size=4),
    "shorter": Scenario(2, vocab_size=4, draft_size=3),
    "vocab": Scenario(draft="vocab", draft_size=4),
    "vocab-2": Scenario(2, vocab_size=4, draft="vocab", draft_size=5),
    "bitmask": Scenario(2, vocab_size=4, allowed=0b1011),
    "masked-logits": Scenario(vocab_size=6, masked_target=(0, 4), masked_draft=(1, 4)),
}
# One of each kind of draft, and one filter on either side.
QUICK_SCENARIOS = [
    *("dense", "sparse", "one-hot-2", "vocab", "masked-logits", "top-k-draft", "min-p"),
]


def grid_size(num_draft_tokens: int, coarse: bool) -> int:
    return {1: (256, 12), 2: (40, 6), 3: (16, 4)}[num_draft_tokens][coarse]


def context_logits(seed: int, context: tuple[int, ...], size: int) -> np.ndarray:
    """Logits that depend on the tokens before."""
    return np.random.default_rng([seed, *context]).normal(size=size).astype(np.float32) * 1.5


def law_of(sampling: Sampling) -> oracle.Sampling:
    return oracle.Sampling(*sampling).of_sequence(0)


def target_logits(scenario: Scenario, context: tuple[int, ...]) -> np.ndarray:
    logits = context_logits(scenario.seed, context, scenario.vocab_size)
    logits[list(scenario.masked_target)] = MASK
    return logits


@lru_cache(None)
def target_probs(scenario: Scenario, context: tuple[int, ...]) -> np.ndarray:
    bitmask = None if scenario.allowed is None else np.array([scenario.allowed], np.int32)
    logits = oracle.masked(target_logits(scenario, context), bitmask)
    return oracle.distribution(logits, law_of(scenario.sampling)).probs


class Path(NamedTuple):
    """One possible draft: its tokens, probability, and rows."""

    tokens: tuple[int, ...]
    prob: float
    target_logits: np.ndarray  # [K+1, V]
    draft_rows: dict[str, np.ndarray]  # draft arguments, each [K, ...]


def enumerate_paths(scenario: Scenario) -> tuple[list[Path], np.ndarray | None]:
    """All drafts of positive probability, and the draft's vocabulary."""
    V, columns = scenario.vocab_size, scenario.draft_size or scenario.vocab_size
    draft_sampling = scenario.draft_sampling or scenario.sampling
    paths = []

    vocab = None
    if scenario.draft == "vocab":  # the target's best id twice, one beyond its vocabulary
        best, *others = np.argsort(-target_logits(scenario, ()))
        vocab = np.array([*others[: columns - 3], best, V, best], np.int32)

    def draft_rows(context) -> tuple[dict, np.ndarray, np.ndarray]:
        """Arguments of one slot, and the ids and probabilities of its draft."""
        logits = context_logits(scenario.seed + 50, context, columns)
        logits[list(scenario.masked_draft)] = MASK
        if scenario.draft == "one_hot":
            return {}, np.array([logits.argmax()]), np.ones(1)
        if scenario.draft == "sparse":
            ids = np.append(np.argsort(-target_logits(scenario, context))[:3], -1).astype(np.int32)
            ids = np.append(ids, ids[0]).astype(np.int32)  # padding, and an id that is repeated
            probs = np.array([0.2, 0.35, 0.15, 0.0, 0.3], np.float32)
            return {"draft_ids": ids, "draft_probs": probs}, ids, probs.astype(np.float64)
        row = oracle.dense_draft(logits, vocab, law_of(draft_sampling))
        return {"draft_logits": logits}, row.ids, row.probs

    def extend(tokens, prob, rows):
        if len(tokens) == scenario.num_draft_tokens:
            contexts = [tokens[:i] for i in range(len(tokens) + 1)]
            stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            targets = np.stack([target_logits(scenario, context) for context in contexts])
            paths.append(Path(tokens, prob, targets, stacked))
            return
        row, ids, probs = draft_rows(tokens)
        for token in np.unique(ids[probs > 0]):
            extend((*tokens, int(token)), prob * probs[ids == token].sum(), [*rows, row])

    extend((), 1.0, [])
    return paths, vocab


def midpoints(dimensions: int, grid: int) -> np.ndarray:
    axis = ((np.arange(grid) + 0.5) / grid).astype(np.float32)
    return np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), axis=-1).reshape(
        -1, dimensions
    )


def emit(verify, scenario: Scenario, grid: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens ``[n, K+1]``, accepted ``[n]`` and weights ``[n]`` over all drafts and grid cells."""
    paths, vocab = enumerate_paths(scenario)
    K = scenario.num_draft_tokens
    coins = midpoints(K + 1, grid)  # V is small: the first uniform of the pair has no effect
    uniforms = mx.array(np.insert(coins, K, 0.5, axis=1))

    def shared(row: np.ndarray) -> mx.array:
        return mx.broadcast_to(mx.array(row), (len(coins), *row.shape))

    options = {"sampling": scenario.sampling}
    if vocab is not None:
        options["draft_vocab"] = mx.array(vocab)
    if scenario.draft_sampling is not None:
        options["draft_sampling"] = scenario.draft_sampling
    if scenario.allowed is not None:
        options["token_bitmask"] = shared(np.full((K + 1, 1), scenario.allowed, np.int32))
    results = [
        verify(
            shared(path.target_logits),
            shared(np.array(path.tokens, np.int32)),
            **{name: shared(rows) for name, rows in path.draft_rows.items()},
            uniforms=uniforms,
            **options,
        )
        for path in paths
    ]
    tokens = np.concatenate([np.array(result.tokens) for result in results])
    num_accepted = np.concatenate([np.array(result.num_accepted) for result in results])
    return tokens, num_accepted, np.repeat([path.prob for path in paths], len(coins)) / len(coins)


def stratified_errors(verify, scenario: Scenario, grid: int) -> tuple[float, float]:
    """The largest errors of the next token and of acceptance, over all contexts.

    Given the accepted tokens before it, the next token follows the target: accepted or not costs
    half a cell of the coin's axis, the draw's interval two ends of half a cell: 1.5 / grid. A draft
    is accepted with min(target, draft): 0.5 / grid. These bounds are below the (K + 1) / grid that
    hold without the condition.
    """
    paths, _ = enumerate_paths(scenario)
    tokens, num_accepted, weights = emit(verify, scenario, grid)
    assert weights.sum() == pytest.approx(1, abs=1e-6)  # sparse probabilities are float32
    K, V = scenario.num_draft_tokens, scenario.vocab_size

    def frequencies(i: int, rows: np.ndarray) -> np.ndarray:
        return np.bincount(tokens[rows, i], weights[rows], minlength=V)

    next_error = accept_error = 0.0
    for i in range(K + 1):
        for context in {path.tokens[:i] for path in paths}:
            here = (num_accepted >= i) & (tokens[:, :i] == np.array(context, np.int32)).all(axis=1)
            mass = weights[here].sum()
            if mass == 0:  # never accepted
                continue
            through = [path for path in paths if path.tokens[:i] == context]
            target = target_probs(scenario, context)
            next_error = max(next_error, abs(frequencies(i, here) / mass - target).max())
            if i < K:
                draft = np.zeros(V)
                for path in through:
                    if path.tokens[i] < V:
                        draft[path.tokens[i]] += path.prob
                draft /= sum(path.prob for path in through)
                accepted = frequencies(i, here & (num_accepted > i)) / mass
                error = abs(accepted - np.minimum(target, draft)).max()
                accept_error = max(accept_error, error)
    return next_error, accept_error


def check_stratified(verify, scenario: Scenario, grid: int) -> float:
    next_error, accept_error = stratified_errors(verify, scenario, grid)
    assert next_error <= 1.5 / grid + TIE
    assert accept_error <= 0.5 / grid + TIE
    return next_error


def check_joint(verify, scenario: Scenario, grid: int) -> float:
    """The joint law of K + 1 tokens, where the target draws those that were not emitted.

    A rule that judges slots together has no simple law per slot. "The first i drafts and then this
    token" costs half a cell of every coin from the i-th on, and two ends of half a cell of the
    draw; these errors add up over i, each with the chance of those drafts and of the tokens behind.
    Returns the largest error as a share of that bound.
    """
    paths, _ = enumerate_paths(scenario)
    tokens, num_accepted, weights = emit(verify, scenario, grid)
    assert (num_accepted == (tokens >= 0).sum(axis=1) - 1).all()
    K, V = scenario.num_draft_tokens, scenario.vocab_size
    shape = [V + 1] * (K + 1)  # the last of each axis: not emitted
    emitted = np.zeros(shape)
    np.add.at(emitted, tuple(tokens.T), weights)

    worst = 0.0
    for text in itertools.product(range(V), repeat=K + 1):
        behind = [continued(scenario, text[:i], text[i:]) for i in range(K + 2)]
        law = bound = 0.0
        for i in range(K + 1):
            law += emitted[text[: i + 1] + (-1,) * (K - i)] * behind[i + 1]
            drafted = sum(path.prob for path in paths if path.tokens[:i] == text[:i])
            cells = 0.5 * (K - max(i - 1, 0)) + 1
            bound += cells / grid * drafted * behind[i + 1]
        error = abs(law - behind[0])
        assert error <= bound + TIE
        worst = max(worst, error / bound if bound else 0.0)
    return worst


def continued(scenario: Scenario, prefix: tuple[int, ...], rest: tuple[int, ...]) -> float:
    """The target's probability of ``rest`` after ``prefix``."""
    prob = 1.0
    for token in rest:
        prob *= target_probs(scenario, prefix)[token]
        prefix = (*prefix, token)
    return prob


@pytest.mark.quick(name=QUICK_SCENARIOS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_stratified_block(backend, figure, name):
    scenario = SCENARIOS[name]
    grid = grid_size(scenario.num_draft_tokens, coarse=backend.simulated)
    error = check_joint(partial(backend.verify_draft, rule="block"), scenario, grid)
    figure("stratified error, as a share of its bound", error)


@pytest.mark.quick(name=QUICK_SCENARIOS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_stratified(backend, figure, name):
    scenario = SCENARIOS[name]
    grid = grid_size(scenario.num_draft_tokens, coarse=backend.simulated)
    error = check_stratified(backend.verify_draft, scenario, grid)
    figure(f"stratified error (bound {1.5 / grid:.4f})", error)


def oracle_as_operation(target_logits, draft_tokens, **given):
    """The oracle with the operation's arguments."""
    for name in ("sampling", "draft_sampling"):
        if name in given:
            given[name] = oracle.Sampling(*given[name])
    arrays = {k: np.array(v) if isinstance(v, mx.array) else v for k, v in given.items()}
    return oracle.verify_draft(np.array(target_logits), np.array(draft_tokens), **arrays)


@pytest.mark.parametrize("name", ["dense", "sparse", "one-hot", "all-filters", "padded", "vocab-2"])
def test_stratified_oracle(name):
    """The oracle itself is exact: it is not only another opinion."""
    scenario = SCENARIOS[name]
    grid = grid_size(scenario.num_draft_tokens, coarse=True)
    check_stratified(oracle_as_operation, scenario, grid)


# Sampling: chi-square over keyed draws

# Every draw of the simulated GPU is replayed against the oracle instead.
SAMPLED_BACKENDS = [backend for backend in BACKENDS if not backend.simulated]
NUM_DRAWS = 200_000
CHUNK = 4000


def chi_square(tokens: np.ndarray, probs: np.ndarray, num_bins: int) -> tuple[float, float, int]:
    """Statistic, its probability and degrees of freedom, over bins of about equal mass."""
    order = np.argsort(-probs, kind="stable")
    mass_before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    bins = np.empty(len(probs), int)
    bins[order] = np.unique((mass_before * num_bins).astype(int), return_inverse=True)[1]
    expected = np.bincount(bins, probs)
    observed = np.bincount(bins[tokens], minlength=len(expected))
    result = scipy.stats.chisquare(observed, expected / expected.sum() * len(tokens))
    return float(result.statistic), float(result.pvalue), len(expected) - 1


def first_tokens(
    backend, target_logits, draft_logits, *, num_draws: int = NUM_DRAWS, reuse_noise: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draft one token with ``sample``, verify it: tokens ``[n, 2]``, accepted, and status."""
    results = []
    for start in range(0, num_draws, CHUNK):
        draft_key, verify_key = mx.random.split(mx.random.key(start))
        draft_keys = mx.random.split(draft_key, CHUNK)
        verify_keys = draft_keys if reuse_noise else mx.random.split(verify_key, CHUNK)
        target = mx.broadcast_to(target_logits, (CHUNK, *target_logits.shape))
        draft = mx.broadcast_to(draft_logits, (CHUNK, *draft_logits.shape))
        drawn = backend.sample(draft[:, 0], keys=draft_keys)
        verified = backend.verify_draft(
            target, drawn.tokens[:, None], draft_logits=draft, keys=verify_keys
        )
        results.append(
            [np.array(x) for x in (verified.tokens, verified.num_accepted, verified.status)]
        )
    return tuple(np.concatenate(x) for x in zip(*results))


NARROW = np.random.default_rng(16).normal(size=16).astype(np.float32) * 1.5


@pytest.mark.parametrize("backend", SAMPLED_BACKENDS, ids=lambda backend: backend.name)
def test_narrow_chi_square(backend, figure):
    """V = 16 and a draft that is as wrong as can be: its logits are the target's negated."""
    target = np.stack([NARROW, NARROW[::-1]])
    tokens, num_accepted, status = first_tokens(backend, mx.array(target), mx.array(-NARROW[None]))
    assert not status.any()
    probs = [oracle.distribution(row, oracle.DEFAULT).probs for row in target]
    for i in (0, 1):
        emitted = tokens[num_accepted >= i, i]
        statistic, p, dof = chi_square(emitted, probs[i], 10**6)
        figure(
            f"chi-square of token {i} ({dof} degrees of freedom, {len(emitted)} draws)", statistic
        )
        assert p > CHI_SQUARE_P


@pytest.mark.filterwarnings("ignore:.*keys. expected other keys:RuntimeWarning")
@pytest.mark.parametrize("backend", SAMPLED_BACKENDS, ids=lambda backend: backend.name)
def test_narrow_chi_square_sees_reused_noise(backend):
    """The control: residual draws that reuse the draft's noise are biased, and that shows."""
    target = np.stack([NARROW, NARROW])
    tokens, _, _ = first_tokens(
        backend, mx.array(target), mx.array(-NARROW[None]), reuse_noise=True
    )
    probs = oracle.distribution(NARROW, oracle.DEFAULT).probs
    assert chi_square(tokens[:, 0], probs, 10**6)[1] < CHI_SQUARE_P


@pytest.mark.quick(num_draws=[8_000])
@pytest.mark.parametrize("num_draws", [8_000, NUM_DRAWS])
@pytest.mark.parametrize("backend", SAMPLED_BACKENDS, ids=lambda backend: backend.name)
def test_wide_chi_square(backend, figure, num_draws):
    """V = 4096, two blocks of the draw, bins of about 1 % of the mass."""
    rng = np.random.default_rng(4096)
    target = rng.normal(size=(2, 4096)).astype(np.float32) * 2
    draft = target[:1] + rng.normal(size=(1, 4096)).astype(np.float32)
    if not backend.fused:  # composed operations read such rows at 2000 a second
        num_draws = min(num_draws, NUM_DRAWS // 4)
    tokens, num_accepted, status = first_tokens(
        backend, mx.array(target), mx.array(draft), num_draws=num_draws
    )
    assert not status.any()
    for i in (0, 1):
        emitted = tokens[num_accepted >= i, i]
        probs = oracle.distribution(target[i], oracle.DEFAULT).probs
        statistic, p, dof = chi_square(emitted, probs, 100)
        figure(
            f"chi-square of token {i} ({dof} degrees of freedom, {len(emitted)} draws)", statistic
        )
        assert p > CHI_SQUARE_P

"""What sets the acceptance rules apart: by enumeration of the law, and on every backend."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import oracle
import pytest
from exactspec import Cascade, Sampling, Typical, reference
from instruction_sets import FLAGS, runs_here
from test_exactness import SAMPLED_BACKENDS, chi_square
from test_verify_draft import assert_same_bits, logs
from tolerances import CHI_SQUARE_P, NOISE, TIE

ROOT = Path(__file__).parent.parent


# Block verification, by enumeration in float64: no operation, no sampling


class Tree:
    """A target and a draft over 3 ids whose rows depend on the tokens before."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.rows: dict = {}
        self.unlike = self.rng.choice([0.2, 1.0, 3.0])

    def at(self, context: tuple[int, ...]) -> tuple[oracle.Row, oracle.Draft]:
        if context not in self.rows:
            logits = 1.5 * self.rng.normal(size=3)
            target = oracle.distribution(logits, oracle.DEFAULT)
            near = logits + self.unlike * self.rng.normal(size=3)
            if self.rng.random() < 0.2:  # an id that only one side can produce
                near[self.rng.integers(3)] = -np.inf
            self.rows[context] = target, oracle.dense_draft(near, None, oracle.DEFAULT)
        return self.rows[context]


def block_accepts(tree: Tree, draft: tuple[int, ...], fault: str = "") -> tuple[list, np.ndarray]:
    """Weights ``w_i`` and accept probabilities ``h_i``, ``0 <= i <= K``, of one draft."""
    K = len(draft)
    weights = [oracle.ONE]
    for i, token in enumerate(draft):
        target, proposal = tree.at(draft[:i])
        probs = float(target.probs[token]), proposal.of(token)
        weights.append(oracle.next_weight(weights[-1], *probs, error=0.0))
    accepts = np.ones(K + 1)  # the empty prefix always passes
    for i in range(1, K):
        row = draft[: i - 1] if fault == "row before" else draft[:i]
        accepts[i] = oracle.accept_probs(*tree.at(row), weights[i])[1]
    accepts[K] = 1.0 if fault == "whole draft" else weights[K].value
    return weights, accepts


def emitted_law(tree: Tree, K: int, fault: str = "") -> tuple[np.ndarray, float]:
    """The joint law ``[3] * (K + 1)`` of the emitted tokens, continued by the target; mean length.

    What is emitted has 1 to ``K + 1`` tokens; drawing the rest from the target makes the lengths
    equal, and exact if and only if what was emitted is.
    """
    law, mean = np.zeros([3] * (K + 1)), 0.0

    def continued(tokens: tuple[int, ...], prob: float) -> None:
        if len(tokens) == K + 1:
            law[tokens] += prob
            return
        for token, p in enumerate(tree.at(tokens)[0].probs):
            continued((*tokens, token), prob * p)

    for draft in itertools.product(range(3), repeat=K):
        prob = np.prod([tree.at(draft[:i])[1].of(token) for i, token in enumerate(draft)])
        weights, accepts = block_accepts(tree, draft, fault)
        rejected_after = np.cumprod(np.append(1.0, (1 - accepts[:0:-1])))[::-1]
        lengths = prob * accepts * rejected_after  # the last prefix that passes
        mean += float(lengths @ np.arange(K + 1))
        for i, chance in enumerate(lengths):
            target, proposal = tree.at(draft[:i])
            weight = oracle.ONE if i == 0 or fault == "residual" else weights[i]
            left = target.probs
            if i < K:
                left = np.maximum(oracle.residual(target, proposal, weight)[0], 0.0)
                left = left if left.sum() > 0 else target.probs
            for token, p in enumerate(left / left.sum()):
                continued((*draft[:i], token), chance * p)
    return law, mean


def target_law(tree: Tree, K: int) -> np.ndarray:
    law = np.ones([3] * (K + 1))
    for tokens in itertools.product(range(3), repeat=K + 1):
        for i, token in enumerate(tokens):
            law[tokens] *= tree.at(tokens[:i])[0].probs[token]
    return law


def mean_of_token_rule(tree: Tree, K: int) -> float:
    """Mean accepted length: the sum over prefixes of the chance that all of it is accepted."""
    mean = 0.0
    for n in range(1, K + 1):
        for draft in itertools.product(range(3), repeat=n):
            accepted = 1.0
            for i, token in enumerate(draft):
                target, proposal = tree.at(draft[:i])
                accepted *= min(target.probs[token], proposal.of(token))
            mean += accepted
    return mean


@pytest.mark.parametrize("K", [1, 2, 3])
def test_block_is_exact_and_never_shorter(figure, K):
    gains, error = [], 0.0
    for seed in range(40):
        tree = Tree(seed)
        law, mean = emitted_law(tree, K)
        error = max(error, abs(law - target_law(tree, K)).max())
        gains.append(mean / mean_of_token_rule(tree, K))
    figure("largest error of the joint law", error)
    figure("mean gain over the token rule", np.mean(gains))
    assert error <= 1e-12
    assert min(gains) >= 1 - 1e-12
    assert max(gains) > 1.05 or K == 1


@pytest.mark.parametrize("fault", ["whole draft", "row before", "residual"])
def test_the_enumeration_sees_faults(fault):
    """The control: each of these changes of the block rule is biased, and that shows."""
    tree = Tree(0)
    assert abs(emitted_law(tree, 3, fault)[0] - target_law(tree, 3)).max() > 1e-3


# Shared noise: a token is a function of key, position and target


def random_rows(shape: tuple[int, ...], seed: int) -> mx.array:
    return 2 * mx.random.normal(shape, key=mx.random.key(seed))


def test_coupled_tokens_are_what_sample_gives(backend):
    """Bit for bit, under any parameters, at every emitted place."""
    B, K, V = (8, 3, 600) if backend.simulated else (64, 4, 5000)
    target, keys = random_rows((B, K + 1, V), 0), mx.random.split(mx.random.key(1), B)
    positions = mx.random.randint(0, 10**6, (B,), key=mx.random.key(2), dtype=mx.int32)
    shape = (B, K + 1, (V + 31) // 32)
    bitmask = mx.random.randint(-(2**31), 2**31 - 1, shape, key=mx.random.key(3), dtype=mx.int32)
    sampling = Sampling(
        temperature=mx.array([0.0, 0.3, 1.0, 1.7] * (B // 4)),
        top_k=mx.array([0, 0, 40, 0] * (B // 4), mx.int32),
        top_p=mx.array([1.0, 0.9, 1.0, 1.0] * (B // 4)),
    )

    def choices(i):
        return backend.sample(
            target[:, i],
            sampling,
            rule="coupled",
            keys=keys,
            positions=positions + i,
            token_bitmask=bitmask[:, i],
            logprobs="filtered",
        )

    alone = [choices(i) for i in range(K + 1)]
    tokens = mx.stack([row.tokens for row in alone], axis=1)
    logprobs = mx.stack([row.logprobs for row in alone], axis=1)
    assert len(set(tokens[:, 0].tolist())) > B // 2
    drafts = tokens[:, :K]
    wrong = mx.arange(K) >= (mx.arange(B) % (K + 1))[:, None]  # from here on
    result = backend.verify_draft(
        target,
        mx.where(wrong, (drafts + 1) % V, drafts),
        sampling=sampling,
        rule="coupled",
        keys=keys,
        positions=positions,
        token_bitmask=bitmask,
        logprobs="filtered",
    )
    assert result.num_accepted.tolist() == (mx.arange(B) % (K + 1)).tolist()
    emitted = np.arange(K + 1) <= np.array(result.num_accepted)[:, None]
    np.testing.assert_array_equal(np.array(result.tokens)[emitted], np.array(tokens)[emitted])
    np.testing.assert_array_equal(np.array(result.logprobs)[emitted], np.array(logprobs)[emitted])
    assert (np.array(result.tokens)[~emitted] == -1).all()


def test_coupled_text_does_not_depend_on_the_drafter(backend):
    """Decoding with a target that is a function of the text: none, good, bad and ragged drafts."""
    V, length, key = 50, 24, mx.random.key(4)

    def target(text: list[int]) -> mx.array:
        return random_rows((V,), hash(tuple(text[-3:])) % 2**31)

    def decode(K: int, unlike: float) -> tuple[list[int], int]:
        text, calls = [7, 8, 9], 0
        while len(text) < length:
            n, drafted = (K + len(text)) % (K + 1) if unlike == 1.0 else K, list(text)
            for i in range(n):
                logits = target(drafted) + unlike * random_rows((V,), len(drafted))
                position = mx.array([len(drafted)])
                row = backend.sample(
                    logits[None], rule="coupled", keys=key[None], positions=position
                )
                drafted.append(row.tokens.item())
            rows = [target(drafted[: len(text) + i]) for i in range(n + 1)]
            drafts = drafted[len(text) :] + [-1] * (K - n)
            result = backend.verify_draft(
                mx.stack(rows + rows[:1] * (K - n))[None],
                mx.array([drafts], mx.int32).reshape(1, K),
                rule="coupled",
                keys=key[None],
                positions=mx.array([len(text)]),
            )
            text += result.tokens[0, : result.num_accepted.item() + 1].tolist()
            calls += 1
        return text[:length], calls

    plain, calls = decode(0, 0.0)
    assert calls == length - 3 and len(set(plain)) > 10
    for K, unlike in ((3, 0.0), (3, 0.5), (4, 1.0), (1, 10.0)):
        text, fewer = decode(K, unlike)
        assert text == plain
        assert fewer < calls or unlike == 10.0


@pytest.mark.quick(num_draws=[8_000])
@pytest.mark.parametrize("num_draws", [8_000, 200_000])
@pytest.mark.parametrize("backend", SAMPLED_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("varied", ["keys", "positions"])
@pytest.mark.parametrize("V", [16, 4096])
def test_coupled_chi_square(backend, figure, V, varied, num_draws):
    """Choices follow the target over keys, and over the positions of one key."""
    row = np.random.default_rng(V).normal(size=V).astype(np.float32) * 1.5
    if not backend.fused and V > 16:  # composed operations read such rows at 2000 a second
        num_draws = min(num_draws, 20_000)
    chunk, tokens = 4000, []
    for start in range(0, num_draws, chunk):
        keys = mx.random.split(mx.random.key(start), chunk)
        positions = mx.full((chunk,), 3, mx.int32)
        if varied == "positions":
            keys = mx.broadcast_to(mx.random.key(5), keys.shape)
            positions = mx.arange(start, start + chunk, dtype=mx.int32)
        logits = mx.broadcast_to(mx.array(row), (chunk, V))
        drawn = backend.sample(logits, rule="coupled", keys=keys, positions=positions)
        tokens.append(np.array(drawn.tokens))
    tokens = np.concatenate(tokens)
    probs = oracle.distribution(row, oracle.DEFAULT).probs
    statistic, p, dof = chi_square(tokens, probs, 10**6 if V == 16 else 100)
    figure(f"chi-square ({dof} degrees of freedom, {len(tokens)} draws)", statistic)
    assert p > CHI_SQUARE_P
    if V == 16 and varied == "positions":  # consecutive choices are independent
        pairs = tokens[:-1:2] * V + tokens[1::2]
        statistic, p, dof = chi_square(pairs, np.outer(probs, probs).ravel(), 500)
        figure(f"chi-square of pairs ({dof} degrees of freedom)", statistic)
        assert p > CHI_SQUARE_P


def coupled_acceptance(target: np.ndarray, draft: np.ndarray) -> float:
    """The chance that both choose the same id by one noise, in closed form.

    With exponential clocks ``e_v`` the choice is the first of ``e_v / prob(v)``; both are ``i`` iff
    ``e_v >= e_i * max(target_v / target_i, draft_v / draft_i)`` for every other ``v``.
    """
    ratios = np.maximum(target[:, None] / target, draft[:, None] / draft)
    return float((1 / ratios.sum(axis=0)).sum())


def acceptance_bounds(distance: float) -> tuple[float, float]:
    """Of the chance that two choices are the same, at a total variation distance.

    Below: of the coupled rule (Daliri et al. 2408.07978), the most that can be had for all pairs of
    distributions without knowing both. Above: of any rule; the token rule attains it.
    """
    return (1 - distance) / (1 + distance), 1 - distance


def test_coupled_acceptance_bounds():
    for seed in range(2000):
        rng = np.random.default_rng(seed)
        sharpness = rng.choice([0.1, 1.0, 10.0])
        target, draft = rng.dirichlet(np.full(rng.integers(2, 9), sharpness), size=2) + 1e-12
        target, draft = target / target.sum(), draft / draft.sum()
        low, high = acceptance_bounds(abs(target - draft).sum() / 2)
        assert low - 1e-9 <= coupled_acceptance(target, draft) <= high + 1e-9


@pytest.mark.parametrize("backend", SAMPLED_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("unlike", [0.3, 1.0, 3.0])
def test_coupled_acceptance(backend, figure, unlike):
    """Drafts by the same noise are accepted as often as the closed form says."""
    B, V = 100_000, 8
    rows = np.random.default_rng(int(10 * unlike)).normal(size=(2, V)).astype(np.float32)
    rows[1] = rows[0] + unlike * rows[1]
    noise = {
        "rule": "coupled",
        "keys": mx.random.split(mx.random.key(6), B),
        "positions": mx.zeros((B,), mx.int32),
    }
    target, draft = (mx.broadcast_to(mx.array(row), (B, 1, V)) for row in rows)
    drafts = backend.sample(draft[:, 0], **noise).tokens[:, None]
    target = mx.concatenate([target, target], axis=1)
    accepted = backend.verify_draft(target, drafts, draft_logits=draft, **noise).num_accepted
    rate = accepted.astype(mx.float32).mean().item()
    probs = [oracle.distribution(row, oracle.DEFAULT).probs for row in rows]
    low, high = acceptance_bounds(abs(probs[0] - probs[1]).sum() / 2)
    wanted = coupled_acceptance(*probs)
    figure(f"accepted (coupled: {wanted:.4f} >= {low:.4f}, token rule: {high:.4f})", rate)
    assert abs(rate - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / B)


# Its noise


def special_words() -> np.ndarray:
    """The ends, where x and e round, and where the series of log1p takes over."""
    series = 2**28  # x = 2**-4
    near = np.arange(-3000, 3000)
    words = [np.arange(6000), series + near, 2**31 + near, 2**32 - 1 - np.arange(6000)]
    return np.concatenate(words).astype(np.uint32)


SOURCE = """
#define EXACTSPEC_ISA portable
#include "block_ops_impl.h"
extern "C" void noise_of(const uint32_t* words, int n, float* out) {
  using namespace exactspec::portable;
  for (int i = 0; i < n; i += kWidth) {
    float word[kWidth] = {}, noise[kWidth];
    int count = least(kWidth, n - i);
    for (int j = 0; j < count; ++j) word[j] = static_cast<float>(words[i + j]);
    store(gumbel_of(load(word)), noise, kWidth);
    __builtin_memcpy(out + i, noise, sizeof(float) * count);
  }
}
"""


def extension_gumbel(folder: Path, instruction_set: str):
    """The function of the CPU code, which is private to its file, built as the extension is."""
    source = folder / "gumbel.cpp"
    source.write_text(SOURCE)
    compiler = shutil.which("c++")
    flags = "-std=c++20 -O3 -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math"
    include = [f"-I{ROOT / name}" for name in ("csrc", "metal")]
    library = folder / "gumbel.so"
    vectors = FLAGS[instruction_set]
    subprocess.run(
        [compiler, *flags.split(), *vectors, "-shared", "-fPIC", *include, source, "-o", library],
        check=True,
    )
    function = ctypes.CDLL(str(library)).noise_of

    def gumbel(words: np.ndarray) -> np.ndarray:
        out = np.empty(len(words), np.float32)
        pointer = ctypes.c_void_p
        function(words.ctypes.data_as(pointer), len(words), out.ctypes.data_as(pointer))
        return out

    return gumbel


@pytest.mark.parametrize("name", [*FLAGS, "reference"])
def test_gumbel_of_words(figure, tmp_path, name):
    """Millions of words, all the delicate ones among them: finite, and as exact as a float32 is."""
    if name in FLAGS:
        if not runs_here(name):
            pytest.skip(f"this processor has no {name}")
        gumbel = extension_gumbel(tmp_path, name)
    else:
        gumbel = lambda words: np.array(reference.gumbel(mx.array(words)))  # noqa: E731
    rng = np.random.default_rng(0)
    small = 2 ** rng.uniform(0, 32, size=10**6)  # every magnitude of x
    words = np.concatenate(
        [special_words(), rng.integers(0, 2**32, size=2 * 10**6), small, 2**32 - small]
    ).astype(np.uint32)
    got, wanted = gumbel(words).astype(np.float64), oracle.gumbel_of(words)
    assert np.isfinite(got).all()
    assert got.max() < 22.9 and got.min() > -2.82
    # G = -log(e): an error of G is a relative error of e, beside the rounding of G itself.
    error = abs(got - wanted) - np.spacing(abs(wanted).astype(np.float32))
    figure("relative error of e", error.max())
    assert error.max() <= NOISE


@pytest.mark.quick(num_keys=[50])
@pytest.mark.parametrize("num_keys", [50, 10_000])
def test_gumbel_of_keys(backend, figure, num_keys):
    """The noise of ids 0 and 1, found from choices between them alone: where does the other win?"""
    B = min(num_keys, 300) if backend.simulated else num_keys
    keys = mx.random.split(mx.random.key(7), B)
    positions = mx.random.randint(0, 2**31 - 1, (B,), key=mx.random.key(8), dtype=mx.int32)
    low, high = np.full(B, -30.0), np.full(B, 30.0)
    for _ in range(24):
        middle = (low + high) / 2
        logits = np.stack([middle, np.zeros(B)], axis=1).astype(np.float32)
        drawn = backend.sample(mx.array(logits), rule="coupled", keys=keys, positions=positions)
        second = np.array(drawn.tokens) == 1
        low, high = np.where(second, middle, low), np.where(second, high, middle)
    noise = [
        oracle.gumbel(key, position, 2)
        for key, position in zip(np.array(keys), positions.tolist(), strict=True)
    ]
    error = abs((low + high) / 2 - [g[1] - g[0] for g in noise]).max()
    figure("largest error of a difference", error)
    assert error <= TIE


# Lossy rules


def drafted(B: int, K: int, V: int) -> dict:
    target = random_rows((B, K + 1, V), 10)
    draft = target[:, :K] + random_rows((B, K, V), 11) / 2
    return {
        "target_logits": target,
        "draft_logits": draft,
        "draft_tokens": mx.random.categorical(draft, key=mx.random.key(12)).astype(mx.int32),
        "keys": mx.random.split(mx.random.key(13), B),
        "sampling": Sampling(temperature=mx.array([0.0, 0.7, 1.0, 1.5] * (B // 4))),
    }


def test_cascade_that_always_defers_is_the_token_rule(backend):
    given = drafted(*((8, 3, 40) if backend.simulated else (64, 4, 3000)))
    cascade = backend.verify_draft(**given, rule=Cascade(-1.0), logprobs="raw", stats=True)
    token = backend.verify_draft(**given, logprobs="raw", stats=True)
    assert token.exact is True and cascade.exact is False
    assert token.num_accepted.sum().item() > 0
    assert_same_bits(cascade[:4], token[:4])


def test_cascade_that_never_defers_accepts_what_the_target_can_produce(backend):
    target = logs([[[0.001, 0.999, 0.0], [1.0, 0.0, 0.0]]] * 2)
    draft = logs([[[0.4, 0.2, 0.4]]] * 2)
    result = backend.verify_draft(
        target,
        mx.array([[0], [2]]),
        draft_logits=draft,
        rule=Cascade(1.0),
        uniforms=mx.full((2, 3), 0.999),
    )
    assert result.tokens.tolist() == [[0, 0], [1, -1]]
    assert result.num_accepted.tolist() == [1, 0] and result.exact is False


def test_typical_limits(backend):
    """Threshold 0: whatever the target can produce. Threshold 1: nothing, and the target's draw."""
    target = logs([[[0.001, 0.999, 0.0], [0.5, 0.5, 0.0]]] * 2)
    given = {
        "target_logits": target,
        "draft_tokens": mx.array([[0], [2]]),
        "uniforms": mx.full((2, 3), 0.25),
    }
    for rule in (Typical(0.0, 1.0), Typical(1.0, 0.0)):
        result = backend.verify_draft(**given, rule=rule)
        assert result.tokens.tolist() == [[0, 0], [1, -1]] and result.exact is False
    result = backend.verify_draft(**given, rule=Typical(1.0, 1e6))
    assert result.tokens.tolist() == [[1, -1], [1, -1]]
    assert result.num_accepted.tolist() == [0, 0]


def test_typical_threshold(backend):
    """Entropy in nats: of four equal ids it is log 4, so delta * exp(-entropy) is delta / 4."""
    target = mx.zeros((2, 2, 4))
    given = {"target_logits": target, "draft_tokens": mx.array([[0], [0]])}
    given["uniforms"] = mx.full((2, 3), 0.9)
    accepted = [
        backend.verify_draft(**given, rule=Typical(epsilon, delta)).num_accepted.tolist()
        for epsilon, delta in ((1.0, 0.99), (1.0, 1.01), (0.249, 5.0), (0.251, 5.0))
    ]
    assert accepted == [[1, 1], [0, 0], [1, 1], [0, 0]]


def test_greedy_rows_are_the_same_under_every_rule(backend):
    """Temperature 0: the argmax decides, and the draft's rows are not read."""
    given = drafted(8, 3, 40)
    given["sampling"] = Sampling(temperature=0.0)
    given["draft_tokens"] = mx.argmax(given["target_logits"][:, :3], axis=-1).astype(mx.int32)
    given["draft_tokens"][::2, 1] = 5
    given["draft_logits"] = mx.full((8, 3, 40), mx.nan)
    wanted = backend.verify_draft(**given)
    assert sorted(set(wanted.num_accepted.tolist())) == [1, 3]
    for rule in ("block", Typical(), Cascade()):
        assert_same_bits(backend.verify_draft(**given, rule=rule)[:3], wanted[:3])
    positions = mx.arange(8, dtype=mx.int32)
    coupled = backend.verify_draft(**given, rule="coupled", positions=positions)
    assert_same_bits(coupled[:3], wanted[:3])

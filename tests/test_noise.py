"""Keys by seed, position and role; and a warning where drafting and verifying share them."""

from __future__ import annotations

import itertools
import warnings

import mlx.core as mx
import numpy as np
import oracle
import pytest
import scipy.stats
from exactspec import Sampling, noise_keys, sample, verify_draft, verify_tree
from exactspec.drafters import Draft, Drafter
from exactspec.generate import generate
from tolerances import CHI_SQUARE_P
from toy_models import TableModel, toy_tokenizer

SEEDS = [0, 1, 7, 2**31 - 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
POSITIONS = [0, 1, 2, 255, 2**20, 2**31 - 1, 2**31, 2**32 - 1]
ROLES = [("verify", 0), *(("draft", step) for step in (0, 1, 2, 253, 2**20, 2**30 - 1))]


def law(seed: int, position: int, role: str, step: int) -> list[int]:
    """The formula of the docs, by the oracle's cipher."""
    key = np.array([seed >> 32, seed % 2**32], np.uint32)
    second = {"draft": 1, "verify": 2}[role] * 2**30 + step
    counter = np.array([position], np.uint32), np.array([second], np.uint32)
    return [int(word[0]) for word in oracle.threefry2x32(key, *counter)]


def test_keys_are_the_law_and_all_different():
    keys = set()
    for seed, position, (role, step) in itertools.product(SEEDS, POSITIONS, ROLES):
        options = {"step": step} if role == "draft" else {}
        got = noise_keys(seed, position, role, **options)
        assert got.dtype == mx.uint32 and got.shape == (2,)
        assert got.tolist() == law(seed, position, role, step)
        keys.add(tuple(got.tolist()))
    assert len(keys) == len(SEEDS) * len(POSITIONS) * len(ROLES)
    key = np.array(mx.random.key(2**40 + 3))
    assert key.tolist() == [2**8, 3]  # a seed's halves, in this order


PINNED = [
    [917456828, 636652529],
    [1630104743, 2146109044],
    [875715123, 918456836],
    [[2152370893, 2555599876], [4056992052, 2259764504]],
]


def test_pinned_keys():
    """What a key gives is stable across releases."""
    assert noise_keys(0, 0, "verify").tolist() == PINNED[0]
    assert noise_keys(0, 0, "draft", 0).tolist() == PINNED[1]
    assert noise_keys(2**64 - 1, 12345, "draft", 3).tolist() == PINNED[2]
    assert noise_keys([1, 2], 40, "verify").tolist() == PINNED[3]


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint64, mx.uint8])
def test_arrays_give_what_numbers_give(dtype):
    seeds, positions, steps = [0, 3, 100], [0, 5, 120], [0, 1, 2, 90]
    expected = [[noise_keys(s, p, "draft", i).tolist() for i in steps] for s, p in
                zip(seeds, positions)]  # fmt: skip
    array = [mx.array(x, dtype) for x in (seeds, positions, steps)]
    numbers = [np.array(x) for x in (seeds, positions, steps)]
    for arrays in (array, numbers, [array[0], numbers[1], steps]):
        at = [x[:, None] if not isinstance(x, list) else [[y] for y in x] for x in arrays[:2]]
        got = noise_keys(*at, "draft", arrays[2])
        assert got.dtype == mx.uint32 and got.tolist() == expected
    assert noise_keys(array[0], array[1], "verify").tolist() == [
        noise_keys(s, p, "verify").tolist() for s, p in zip(seeds, positions)
    ]
    large = mx.array(np.array([2**63 + 5], np.uint64))
    assert noise_keys(large, 9, "verify").tolist() == [law(2**63 + 5, 9, "verify", 0)]


def test_a_sequence_has_its_keys_in_any_batch():
    alone = noise_keys(7, 30, "verify").tolist()
    for others in ([], [1], [7, 7, 9]):
        batch = noise_keys([*others, 7], [*range(len(others)), 30], "verify")
        assert batch.shape == (len(others) + 1, 2) and batch[-1].tolist() == alone
    assert noise_keys([], [], "verify").shape == (0, 2)


def test_compile_and_vmap():
    seeds, positions = mx.array([1, 2, 3]), mx.array([10, 20, 30])
    expected = noise_keys(seeds, positions, "draft", 4).tolist()

    def keys(seeds, positions):
        return noise_keys(seeds, positions, "draft", 4)

    assert mx.compile(keys)(seeds, positions).tolist() == expected
    assert mx.vmap(keys)(seeds, positions).tolist() == expected
    only = mx.vmap(keys, in_axes=(None, 0))(seeds[0], positions).tolist()
    assert only == noise_keys(1, positions, "draft", 4).tolist()
    only = mx.vmap(keys, in_axes=(0, None))(seeds, positions[1]).tolist()
    assert only == noise_keys(seeds, 20, "draft", 4).tolist()


@pytest.mark.parametrize(
    ("arguments", "name", "error"),
    [
        ((-1, 0, "verify"), "seeds", ValueError),
        ((2**64, 0, "verify"), "seeds", ValueError),
        (([1, -1], 0, "verify"), "seeds", ValueError),
        ((10**5000, 0, "verify"), "seeds", ValueError),
        ((0, 2**32, "verify"), "positions", ValueError),
        ((0, 0, "draft", 2**30), "step", ValueError),
        ((0, 0, "verify", 0), "step", ValueError),
        ((0, 0, "draft"), "step", ValueError),
        ((0, 0, "coupled"), "role", ValueError),
        ((0, 0, None), "role", ValueError),
        (([1, 2], [1, 2, 3], "verify"), "seeds, positions, step", ValueError),
        ((True, 0, "verify"), "seeds", TypeError),
        ((1.0, 0, "verify"), "seeds", TypeError),
        ((None, 0, "verify"), "seeds", TypeError),
        (([mx.array(1)], 0, "verify"), "seeds", TypeError),
        (([[1], [1, 2]], 0, "verify"), "seeds", TypeError),
        ((mx.array([1.0]), 0, "verify"), "seeds", TypeError),
        ((0, "3", "verify"), "positions", TypeError),
    ],
)
def test_bad_arguments(arguments, name, error):
    with pytest.raises(error, match=rf"\[noise_keys\] {name}: expected .*, got"):
        noise_keys(*arguments)


# The right way, and the wrong way


def first_tokens(keys_of, n: int = 100_000) -> np.ndarray:
    """Frequencies of the first token of drafts that are drawn and verified."""
    target = mx.log(mx.array([0.3, 0.2, 0.15, 0.35]))
    draft = mx.log(mx.array([0.05, 0.1, 0.35, 0.5]))
    rows = mx.broadcast_to(target, (n, 2, 4))
    drafts = mx.broadcast_to(draft, (n, 1, 4))
    draft_keys, verify_keys = keys_of(n)
    drawn = sample(drafts[:, 0], keys=draft_keys)
    result = verify_draft(rows, drawn.tokens[:, None], draft_logits=drafts, keys=verify_keys)
    return np.bincount(np.array(result.tokens[:, 0]), minlength=4)


def test_noise_keys_give_the_target():
    seeds = mx.arange(100_000)
    keys = noise_keys(seeds, 5, "draft", 0), noise_keys(seeds, 5, "verify")
    counts = first_tokens(lambda n: keys)
    expected = 100_000 * np.array([0.3, 0.2, 0.15, 0.35])
    assert scipy.stats.chisquare(counts, expected).pvalue > CHI_SQUARE_P


def test_one_key_for_both_is_noticed():
    def shared(n):
        keys = noise_keys(mx.arange(n), 5, "draft", 0)
        return keys, keys

    with pytest.warns(RuntimeWarning, match=r"\[verify_draft\] keys: expected other keys"):
        counts = first_tokens(shared)
    # And with reason: this is far from the target.
    expected = 100_000 * np.array([0.3, 0.2, 0.15, 0.35])
    assert scipy.stats.chisquare(counts, expected).pvalue < 1e-20
    row = mx.zeros((3, 8))
    keys = noise_keys([1, 2, 3], 0, "draft", 0)
    tokens = sample(row, keys=keys).tokens
    options = {"draft_logits": mx.zeros((3, 2, 8)), "keys": keys}
    with pytest.warns(RuntimeWarning, match=r"\[verify_tree\] keys"):
        verify_tree(mx.zeros((3, 2, 8)), tokens[:, None], mx.full((3, 1), -1), **options)
    # A draft that is handed over as certain was drawn all the same.
    with pytest.warns(RuntimeWarning, match=r"\[verify_draft\] keys"):
        verify_draft(mx.zeros((3, 2, 8)), tokens[:, None], keys=keys)


def test_no_warning_where_noise_may_be_shared():
    keys = noise_keys([1, 2, 3], 0, "draft", 0)
    rows, target = mx.zeros((3, 8)), mx.zeros((3, 2, 8))
    positions = mx.array([4, 5, 6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Coupled noise has to be shared.
        coupled = {"rule": "coupled", "keys": keys, "positions": positions}
        drawn = sample(rows, **coupled).tokens[:, None]
        verify_draft(target, drawn, draft_logits=rows[:, None], **coupled)
        # At temperature 0 there is none.
        sample(rows, Sampling(0), keys=keys)
        verify_draft(target, drawn, draft_logits=rows[:, None], keys=keys)
        sample(rows, keys=keys)
        # Nor does a draft of no tokens share any.
        empty = mx.zeros((3, 0), mx.int32)
        verify_draft(target[:, :1], empty, draft_logits=mx.zeros((3, 0, 8)), keys=keys)
        # Keys of their own, also where the first ones are gone and their place is taken.
        for seed in range(200):
            sample(rows, keys=noise_keys([seed, 2, 3], 0, "draft", 0))
            other = noise_keys([seed, 2, 3], 0, "verify")
            verify_draft(target, drawn, draft_logits=rows[:, None], keys=other)


# The decode loop


def test_the_loop_draws_by_noise_keys(monkeypatch):
    """The text of a seed is what the operations give by hand."""
    table = 2 * mx.random.normal((2, 16, 16), key=mx.random.key(3))
    seen = []

    class Watching(Drafter):
        def draft(self, limit, key):
            seen.append(key.tolist())
            return Draft(mx.array([3, 5], mx.int32)[:limit])

    seed, prompt = 2**40 + 5, [1, 2]
    result = generate(
        TableModel(table), toy_tokenizer(), prompt, drafter=Watching(), seed=seed, max_tokens=30,
        stop_tokens=[],
    )  # fmt: skip
    text, drafts = [*prompt], []
    model = TableModel(table)
    while len(text) < len(prompt) + 30:
        at = len(text)
        draft = [3, 5][: len(prompt) + 30 - at - 1]
        if draft:
            drafts.append(noise_keys(seed, at, "draft", 0).tolist())
        logits = model(mx.array([[*text, *draft]]), None)[0, at - 1 :]
        keys = noise_keys(seed, at, "verify")
        tokens = verify_draft(logits, mx.array(draft, mx.int32), keys=keys).tokens.tolist()
        text += [token for token in tokens if token >= 0]
    assert result.tokens == text[2:]
    assert seen == drafts

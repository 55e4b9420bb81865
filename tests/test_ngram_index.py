"""Prompt lookup's index: it proposes what a plain search finds, in few bytes and steps a token."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from exactspec.ngram_index import NgramIndex
from hypothesis import given, settings
from hypothesis import strategies as st


def search(text: list[int], lengths: range, num_latest: int) -> list[int]:
    """What ``NgramIndex.matches`` yields, by looking at the whole text."""
    found = []
    for n in lengths:
        ngram = text[len(text) - n :]
        places = [p for p in range(n, len(text)) if text[p - n : p] == ngram and n <= len(text)]
        found += places[::-1][:num_latest]
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), max_size=120),
    *(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4)),
)
def test_finds_what_a_search_of_the_text_finds(text, shortest, more, num_latest):
    lengths = range(shortest + more, shortest - 1, -1)
    index = NgramIndex(lengths, num_latest)
    for end, token in enumerate(text):
        assert list(index.matches()) == search(text[:end], lengths, num_latest)
        index.append(token)
    assert list(index.text) == text


@pytest.mark.parametrize("num_latest", [1, 3])
def test_finds_it_behind_many_others(num_latest):
    """Tables have grown, and n-grams share places in them."""
    text = np.random.default_rng(0).integers(0, 40, 1500).tolist()
    lengths = range(3, 1, -1)
    index = NgramIndex(lengths, num_latest)
    for token in text:
        index.append(token)
    for token in text[:20]:
        assert list(index.matches()) == search(list(index.text), lengths, num_latest)
        index.append(token)


TEXTS = {
    "all different": lambda n: np.arange(n),
    "random": lambda n: np.random.default_rng(0).integers(0, 50_000, n),
    "one token": lambda n: np.zeros(n, int),
    "two tokens": lambda n: np.random.default_rng(0).integers(0, 2, n),
    "a cycle": lambda n: np.arange(n) % 1000,
}


@pytest.mark.parametrize("num_latest", [1, 4])
@pytest.mark.parametrize("kind", TEXTS)
def test_takes_few_bytes_and_steps_a_token(kind, num_latest, figure):
    text = TEXTS[kind](9_000).tolist()
    tracemalloc.start()
    try:
        index = NgramIndex(range(3, 1, -1), num_latest)
        for token in text:
            index.append(token)
            for _ in index.matches():
                pass
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    figure("bytes a token", size / len(text))
    figure("steps a token", index.steps / len(text))
    assert size <= 100 * len(text)
    # Two lengths, each looked up twice and put into a larger table now and then, past a few others.
    assert index.steps <= 16 * len(text)

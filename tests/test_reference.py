"""The reference's sums; what it computes is tested with the other backends."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from exactspec import reference

# Filters and draws may be off by this share of the mass.
MASS_ERROR = 1e-6


@pytest.mark.parametrize("size", [1, 31, 32, 33, 1024, 2049, 152064])
@pytest.mark.parametrize("kind", ["flat", "uneven", "head and tail"])
def test_sums_do_not_lose_the_tail(size, kind):
    rng = np.random.default_rng(size)
    mass = {
        "flat": np.full((2, size), 0.1),
        "uneven": rng.exponential(size=(2, size)),
        "head and tail": np.where(np.arange(size) == 0, size, rng.random((2, size))),
    }[kind].astype(np.float32)
    exact = np.cumsum(mass.astype(np.float64), axis=-1)
    total = np.array(reference.total(mx.array(mass)))
    cumulative = np.array(reference.cumulative(mx.array(mass)))
    assert cumulative.shape == mass.shape
    assert (abs(total - exact[:, -1]) <= MASS_ERROR * exact[:, -1]).all()
    assert (abs(cumulative - exact) <= MASS_ERROR * exact[:, -1:]).all()


def test_a_running_sum_would_lose_it():
    """The control: the bound is out of reach of one float32 sum over a large vocabulary."""
    mass = np.random.default_rng(0).exponential(size=152064).astype(np.float32)
    exact = mass.astype(np.float64).sum()
    assert abs(mx.cumsum(mx.array(mass))[-1].item() - exact) > MASS_ERROR * exact

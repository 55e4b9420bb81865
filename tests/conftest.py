"""Fixtures of the whole suite: the backends, and figures that tests report."""

# ruff: noqa: E402
from __future__ import annotations

import exactspec_openblas

exactspec_openblas.use_openblas()  # real models take minutes otherwise; before MLX is imported

import itertools
import zlib

import pytest
from backends import BACKENDS

FIGURES = pytest.StashKey[list]()


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param


@pytest.fixture(params=[b for b in BACKENDS if b.fused], ids=lambda backend: backend.name)
def fused_backend(request):
    return request.param


@pytest.fixture(autouse=True)
def _simulator(request):
    """Each test of the simulated GPU runs in one of many ways and must leave no defect behind."""
    parameters = getattr(request.node, "callspec", None)
    values = parameters.params.values() if parameters else ()
    if not any(getattr(value, "simulated", False) for value in values):
        yield
        return
    from metal_sim import simulator

    ways = itertools.product(("sequence", "split"), (32, 96, 256), simulator.ORDERS)
    chosen = list(ways)[zlib.crc32(request.node.name.encode()) % 18]
    with simulator.options(**dict(zip(("variant", "max_threads", "order"), chosen))):
        yield
    simulator.check()


@pytest.fixture
def figure(request, record_property):
    """``figure(name, value)``: shown at the end of the run and kept in the JUnit report."""

    def report(name: str, value: float) -> None:
        record_property(name, value)
        request.config.stash.setdefault(FIGURES, []).append((request.node.name, name, value))

    return report


def pytest_terminal_summary(terminalreporter, config):
    figures = config.stash.get(FIGURES, [])
    if figures:
        terminalreporter.section("figures")
    for test, name, value in figures:
        terminalreporter.line(f"{test}: {name} = {value:.4g}")

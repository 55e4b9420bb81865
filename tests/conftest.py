"""Fixtures of the whole suite: the backends, and figures that tests report."""

# ruff: noqa: E402
from __future__ import annotations

import exactspec_openblas

exactspec_openblas.use_openblas()  # real models take minutes otherwise; before MLX is imported

import itertools
import zlib

import numpy as np
import pytest
from backends import BACKENDS
from exactspec import generate as generate_module


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    """Whatever ``@pytest.mark.quick(name=[values])`` does not list is a longer proof.

    Backends are listed by name, other values as they are.
    """
    for item in items:
        for mark in item.iter_markers("quick"):
            for name, kept in mark.kwargs.items():
                value = item.callspec.params[name]
                if getattr(value, "name", value) not in kept:
                    item.add_marker(pytest.mark.prove)


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
def erratic_clock(monkeypatch):
    """A clock whose cycles take random times, the same in every run: the draft length wanders."""

    class Clock:
        now, random = 0.0, np.random.default_rng(0)

        def perf_counter(self):
            self.now += self.random.exponential()
            return self.now

    monkeypatch.setattr(generate_module, "time", Clock())


@pytest.fixture
def figure(record_property):
    """``figure(name, value)``: shown at the end of the run and kept in the JUnit report."""
    # As a plain float, which one process of a test run can send to another.
    return lambda name, value: record_property(name, float(value))


def pytest_terminal_summary(terminalreporter):
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "when")]
    lines = [
        f"{report.nodeid.split('::', 1)[1]}: {name} = {value:.4g}"
        for report in sorted(reports, key=lambda report: report.nodeid)
        if report.when == "teardown"
        for name, value in report.user_properties
    ]
    if lines:
        terminalreporter.section("figures")
    for line in lines:
        terminalreporter.line(line)

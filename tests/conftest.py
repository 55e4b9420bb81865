"""Fixtures of the whole suite: the backends, and figures that tests report."""

from __future__ import annotations

import pytest
from backends import BACKENDS

FIGURES = pytest.StashKey[list]()


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param


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

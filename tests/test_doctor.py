"""``exactspec doctor``: passes here, and says what is wrong when something is."""

from __future__ import annotations

import mlx.core as mx
import pytest
from exactspec import Sampling, doctor, sample, verify_draft, verify_tree
from exactspec.cases import CASES
from exactspec.cli import app
from metal_sim import simulator
from typer.testing import CliRunner


def test_passes_here():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.output
    assert f"cases with known results: {len(CASES)} of {len(CASES)}" in result.output
    for name in ("exactspec", "mlx", "mlx-lm", "python", "system", "device", "blas"):
        assert name in result.output


@pytest.mark.parametrize(
    "fault, check",
    [
        (lambda **_: 1 / 0, "ZeroDivisionError"),
        # A draft that is always believed.
        (lambda **given: {**given, "uniforms": given["uniforms"] * 0}, "stratified exactness"),
        # A filter that is skipped.
        (lambda **given: {**given, "sampling": Sampling()}, "cases with known results"),
    ],
)
def test_notices_a_fault(monkeypatch, fault, check):
    def broken(target_logits, draft_tokens, stream=None, **given):
        return verify_draft(target_logits, draft_tokens, **fault(**given))

    monkeypatch.setattr(doctor, "verify_draft", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert any("FAILED" in line and check in line for line in result.output.splitlines())


def test_checks_of_a_gpu_pass_on_the_simulated_one(monkeypatch):
    """Those that a Mac would run, with the shaders in place of the CPU's code."""

    def on_simulator(operation, simulated):
        return lambda *args, stream=None, **given: (
            operation(*args, **given) if stream is mx.cpu else simulated(*args, **given)
        )

    monkeypatch.setattr(doctor, "verify_draft", on_simulator(verify_draft, simulator.verify_draft))
    monkeypatch.setattr(doctor, "verify_tree", on_simulator(verify_tree, simulator.verify_tree))
    monkeypatch.setattr(doctor, "sample", on_simulator(sample, simulator.sample))
    checks = (doctor._builds, doctor._cases, doctor._keyed, doctor._chains, doctor._agrees_with_cpu)
    for check in checks:
        ok, detail = check(None)
        assert ok, detail
    simulator.check()


def test_an_interrupted_check_leaves_the_choice_of_the_variant_as_it_was(monkeypatch):
    chosen = []

    class Extension:
        @staticmethod
        def set_metal_tuning(*choice):
            chosen.append(choice)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_ext", Extension)
    monkeypatch.setattr(doctor, "verify_draft", interrupted)
    with pytest.raises(KeyboardInterrupt):
        doctor._variants(mx.cpu)
    assert chosen == [(1, 0), (0, 0)]

"""The CPU's vector loops on every instruction set; results depend on neither it nor threads."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from backends import BACKENDS
from exactspec import Sampling, _ext
from instruction_sets import FLAGS, runs_here
from strategies import RULES, replay, sample_problems, verify_problems
from tolerances import LOGPROB, TIE_SHARE

HERE = Path(__file__).parent
ROOT = HERE.parent
FUSED = ("avx2", "avx512", "neon")  # with a fused multiply-add: they give the same bits
COMPILE = "-std=c++20 -O3 -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
ZIG = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]


# The loops themselves, in a program of their own


def require(name: str) -> None:
    if name == "neon":
        if QEMU is None:
            pytest.skip("no qemu-aarch64 (Debian: apt-get install qemu-user-static)")
    elif not runs_here(name):
        pytest.skip(f"this processor has no {name}")


@functools.cache
def outcome(name: str, folder: Path) -> tuple[int, str]:
    """Exit status and output of ``block_ops_check.cpp`` for one instruction set."""
    space = "portable" if name == "neon" else name
    compiler, link, run = [shutil.which("c++") or "c++"], [], []
    if name == "neon":
        compiler, link, run = ZIG, ["-static", "-nostdlib++"], [QEMU]
    options = [*COMPILE, *(f"-I{ROOT / part}" for part in ("csrc", "metal"))]
    options += [f"-DEXACTSPEC_ISA={space}", f"-DHAS_FMA={int(name in FUSED)}", "-DROUNDS=2000"]
    objects = []
    for source, flags in (
        (ROOT / "csrc" / f"block_ops_{space}.cpp", FLAGS.get(name, ())),
        (HERE / "block_ops_check.cpp", ()),
    ):
        objects.append(folder / f"{source.stem}_{name}.o")
        defines = options if source.parent == HERE else options[:-3]
        subprocess.run([*compiler, *defines, *flags, "-c", source, "-o", objects[-1]], check=True)
    program = folder / f"check_{name}"
    subprocess.run([*compiler, *link, *objects, "-o", program], check=True)
    result = subprocess.run([*run, program], stdout=subprocess.PIPE, text=True)
    return result.returncode, result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("block_ops")


# Compiling the C library for another processor takes a minute or more.
NEON = pytest.param("neon", marks=pytest.mark.prove)


@pytest.mark.parametrize("name", [*FLAGS, NEON])
def test_vector_loops(folder, name):
    """Every function against plain loops in double: tails, -inf, NaN, ties at the cutoff."""
    require(name)
    status, output = outcome(name, folder)
    assert status == 0 and output.startswith("0 failures"), output


@pytest.mark.parametrize("name", ["avx512", NEON])
def test_vector_loops_give_the_same_bits(folder, name):
    """As AVX2 does: order and rounding of all sums are those of 16 lanes, whatever the width."""
    require("avx2")
    require(name)
    assert outcome(name, folder)[1] == outcome("avx2", folder)[1]


# The operations, each in a process of its own: both are chosen once, when they are first needed


def in_process(command: str, **environment: str) -> str:
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, __file__, command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.quick(name=["portable"])
@pytest.mark.parametrize("name", ["portable", "avx2"])
def test_replay(name):
    """The oracle's ids, as ``test_verify_draft.py`` and ``test_sample.py`` test them."""
    require(name)
    assert in_process("replay", EXACTSPEC_ISA=name) == f"{name}\n"


def test_threads_change_no_bit():
    """One, two or many; sequences alone or in a batch."""
    one = in_process("results", EXACTSPEC_THREADS="1")
    assert len(one.split()) == 4 * len(SAMPLINGS)
    for count in ("2", "7"):
        assert in_process("results", EXACTSPEC_THREADS=count) == one


def test_instruction_sets_with_fma_change_no_bit():
    require("avx512")
    assert in_process("results", EXACTSPEC_ISA="avx2") == in_process("results")


def test_portable_results_are_close():
    """The same ids, but at ties, and log-probabilities up to the stated tolerance."""
    ours, portable = (
        np.array(in_process("logprobs", **environment).split(), float).reshape(2, -1)
        for environment in ({}, {"EXACTSPEC_ISA": "portable"})
    )
    assert np.mean(ours[0] != portable[0]) <= TIE_SHARE
    same = (ours[0] == portable[0]) & (ours[0] >= 0)
    assert same.sum() > 100
    np.testing.assert_allclose(ours[1][same], portable[1][same], rtol=LOGPROB, atol=LOGPROB)


def test_exp_sum_seconds():
    # A machine that is busy with other things may show it late, but shows it.
    pairs = ([_ext.exp_sum_seconds(n, 20) for n in (2**14, 2**20)] for _ in range(100))
    assert any(0 < 8 * few < many for few, many in pairs)
    for arguments in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="exp_sum_seconds: (n|repeats): expected"):
            _ext.exp_sum_seconds(*arguments)


# What those processes do

CPU = BACKENDS[0]
SAMPLINGS = (
    Sampling(0.6),
    Sampling(0.6, top_k=20, top_p=0.95),
    Sampling(0.8, top_p=0.95),
    Sampling(1.3, top_k=500, order="sequential", top_p=0.8),
    Sampling(0.7, min_p=0.01, order="temperature_last"),
)


def runs(B: int = 4, K: int = 3, V: int = 200_000):
    """Results of all rules and filters, on rows that several threads share."""
    target, noise = (3 * mx.random.normal((B, n, V), key=mx.random.key(n)) for n in (K + 1, K))
    draft = target[:, :K] + 0.2 * noise
    keys = mx.random.split(mx.random.key(7), B)
    for sampling in SAMPLINGS:
        drafted = [
            CPU.sample(draft[:, i], sampling, keys=mx.random.split(mx.random.key(i), B))
            for i in range(K)
        ]
        tokens = mx.stack([row.tokens for row in drafted], axis=1)
        for rule in ("token", "block", "coupled"):
            given = {
                "target_logits": target,
                "draft_tokens": tokens,
                "draft_logits": draft,
                "keys": keys,
                **({"positions": mx.arange(B)} if rule == "coupled" else {}),
            }
            options = {"sampling": sampling, "rule": rule, "logprobs": "filtered"}
            yield given, options, CPU.verify_draft(**given, **options, stats=True)
        yield None, None, drafted[0]


def print_results() -> None:
    for given, options, result in runs():
        arrays = (*result[:4], *(getattr(result, "stats", None) or ()))
        flat = [x for x in arrays if x is not None]
        if given is not None:  # a row alone has the bits that it has among others
            alone = CPU.verify_draft(**{k: v[2:3] for k, v in given.items()}, **options)
            for x, y in zip(flat[:4], alone[:4]):
                np.testing.assert_array_equal(np.array(x)[2:3], np.array(y))
        digest = hashlib.sha256()
        for x in flat:
            digest.update(np.array(x).tobytes())
        print(digest.hexdigest())


def print_logprobs() -> None:
    results = [result for given, _, result in runs(B=24, V=20_000) if given is not None]
    for name in ("tokens", "logprobs"):
        for result in results:
            print(*np.array(getattr(result, name)).ravel().astype(float))


def replay_problems() -> None:
    import test_sample
    import test_verify_draft

    for rule in RULES:
        check = functools.partial(test_verify_draft.check_replay, CPU)
        assert replay(verify_problems(rule), check, 60) <= 2 * TIE_SHARE, rule
    for rule in ("independent", "coupled"):
        check = functools.partial(test_sample.check_replay, CPU)
        assert replay(sample_problems(rule), check, 60) <= 2 * TIE_SHARE, rule
    print(_ext.instruction_set())


if __name__ == "__main__":
    {"results": print_results, "logprobs": print_logprobs, "replay": replay_problems}[sys.argv[1]]()

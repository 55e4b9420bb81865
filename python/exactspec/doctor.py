"""Self-test of an installation: versions, devices, and whether the operations are right on them."""

from __future__ import annotations

import itertools
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import _ext
from .blas import blas_in_use
from .cases import CASES, mismatches, mlx_arguments
from .ops import sample, verify_draft
from .sampling import Sampling
from .tree import verify_tree

# float32 sums of a few probabilities, beside the grid's own resolution.
ROUNDING = 1e-5


class Check(NamedTuple):
    """One line of the report."""

    name: str
    ok: bool
    detail: str


def versions() -> dict[str, str]:
    """What a bug report needs to say about the machine."""
    return {
        "exactspec": version("exactspec"),
        "mlx": f"{mx.__version__} (extension built for {_ext.MLX_VERSION}, "
        f"nanobind {_ext.NANOBIND_VERSION})",
        "mlx-lm": version("mlx-lm"),
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "device": f"{mx.default_device()} {mx.device_info().get('device_name', '')}".strip(),
        "blas": blas_in_use(),
    }


def run_checks() -> Iterator[Check]:
    """Every check on every device of this machine, as it finishes."""
    checks = (_builds, _cases, _stratified, _keyed, _chains)
    for check in checks:
        yield _guarded("cpu", check, mx.cpu)
    if mx.metal.is_available():
        for check in (*checks, _agrees_with_cpu, _variants):
            yield _guarded("gpu", check, mx.gpu)


def _guarded(name: str, check: Callable[[mx.Device], tuple[bool, str]], device) -> Check:
    title = f"{name}: {check.__doc__}"
    try:
        return Check(title, *check(device))
    except Exception as error:  # a self-test reports whatever breaks, then goes on
        return Check(title, False, f"{type(error).__name__}: {error}")


def _builds(device) -> tuple[bool, str]:
    """the operations build and run"""
    result = sample(mx.zeros((1, 8)), uniforms=mx.zeros((1, 2)), stream=device)
    return result.tokens.tolist() == [0], "drew the first of eight equal tokens at u = 0"


def _cases(device) -> tuple[bool, str]:
    """cases with known results"""
    failed = []
    for case in CASES:
        rule = case.get("rule", "token")
        result = verify_draft(**mlx_arguments(case), rule=rule, stream=device)
        if mismatches(case["expect"], result.tokens, result.num_accepted, result.status):
            failed.append(case["name"])
    detail = f"{len(CASES) - len(failed)} of {len(CASES)}"
    return not failed, detail + (f"; failed: {', '.join(failed)}" if failed else "")


def _stratified(device) -> tuple[bool, str]:
    """stratified exactness"""
    grid = 64
    target = np.array([0.5, 0.3, 0.15, 0.05])
    worst = 0.0
    for draft in ([0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.0, 0.3]):
        emitted = np.zeros(4)
        # Every proposal, and midpoints of a grid over its coin and over the draw.
        points = (np.arange(grid) + 0.5) / grid
        coin, pick = (axis.ravel() for axis in np.meshgrid(points, points))
        uniforms = np.stack([coin, 0 * coin, pick], axis=1)
        for token, weight in enumerate(draft):
            if weight == 0:
                continue
            with np.errstate(divide="ignore"):
                logits = mx.array(np.log([[target, target]] * len(coin)).astype(np.float32))
                draft_logits = mx.array(np.log([[draft]] * len(coin)).astype(np.float32))
            result = verify_draft(
                logits,
                mx.full((len(coin), 1), token, mx.int32),
                draft_logits=draft_logits,
                uniforms=mx.array(uniforms.astype(np.float32)),
                stream=device,
            )
            first = np.array(result.tokens)[:, 0]
            emitted += weight * np.bincount(first, minlength=4) / len(coin)
        worst = max(worst, np.abs(emitted - target).max())
    limit = 2 / grid + ROUNDING
    return bool(worst <= limit), f"largest error {worst:.2g} of at most {limit:.2g}"


def _keyed(device) -> tuple[bool, str]:
    """keyed noise equals mx.random's"""
    keys = mx.random.split(mx.random.key(0), 64)
    noise = mx.stack([mx.random.uniform(shape=(_ext.NOISE_WORDS,), key=key) for key in keys])
    logits = mx.random.normal((64, 5000), key=mx.random.key(1))
    keyed = sample(logits, keys=keys, stream=device).tokens
    given = sample(logits, uniforms=noise[:, -2:], stream=device).tokens
    same = mx.sum(keyed == given).item()
    return same == 64, f"{same} of 64 tokens"


def _problems() -> Iterator[tuple[mx.array, mx.array, dict]]:
    """Target logits, draft tokens and further arguments: three dtypes, four filters."""
    settings = [Sampling(0.7), Sampling(0.7, 20), Sampling(0.7, 0, 0.9), Sampling(0.7, 0, 1, 0.05)]
    dtypes = (mx.float32, mx.float16, mx.bfloat16)
    for i, (sampling, dtype) in enumerate(itertools.product(settings, dtypes)):
        target_key, draft_key, token_key, coin_key = mx.random.split(mx.random.key(i), 4)
        target = (mx.random.normal((8, 4, 5000), key=target_key) * 3).astype(dtype)
        draft = (target[:, :3] + mx.random.normal((8, 3, 5000), key=draft_key)).astype(dtype)
        drawn = sample(
            draft.reshape(24, 5000), sampling, keys=mx.random.split(token_key, 24), stream=mx.cpu
        )
        uniforms = mx.random.uniform(shape=(8, 5), key=coin_key)
        further = {"draft_logits": draft, "sampling": sampling, "uniforms": uniforms}
        yield target, drawn.tokens.reshape(8, 3), further


def _chains(device) -> tuple[bool, str]:
    """a tree that is a chain gives what its drafts give"""
    same = total = 0
    for target, tokens, further in _problems():
        drafts = verify_draft(target, tokens, **further, stream=device).tokens
        rows = mx.pad(further.pop("draft_logits"), [(0, 0), (0, 1), (0, 0)])
        parents = mx.broadcast_to(mx.arange(-1, 2, dtype=mx.int32), tokens.shape)
        tree = verify_tree(target, tokens, parents, draft_logits=rows, **further, stream=device)
        same += mx.sum(mx.all(tree.tokens == drafts, axis=1)).item()
        total += len(tokens)
    # A uniform may fall so close to a threshold that rounding decides.
    return same >= total - 1, f"{same} of {total} sequences"


def _agrees_with_cpu(device) -> tuple[bool, str]:
    """agrees with the CPU"""
    same = total = 0
    for target, tokens, further in _problems():
        here = verify_draft(target, tokens, **further, stream=device).tokens
        there = verify_draft(target, tokens, **further, stream=mx.cpu).tokens
        same += mx.sum(mx.all(here == there, axis=1)).item()
        total += len(tokens)
    # A uniform may fall so close to a threshold that rounding decides.
    return same >= total - 1, f"{same} of {total} sequences"


def _variants(device) -> tuple[bool, str]:
    """both Metal variants give the same bits"""
    same = total = 0
    for target, tokens, further in _problems():
        results = []
        try:
            for variant, max_threads in ((1, 0), (2, 0), (2, 32)):
                _ext.set_metal_tuning(variant, max_threads)
                result = verify_draft(
                    target, tokens, **further, logprobs="filtered", stream=device
                )
                mx.eval(result.tokens, result.logprobs)
                results.append((np.array(result.tokens), np.array(result.logprobs)))
        finally:
            _ext.set_metal_tuning(0, 0)
        total += 1
        same += all(
            np.array_equal(a, b, equal_nan=True)
            for other in results[1:]
            for a, b in zip(results[0], other)
        )
    return same == total, f"{same} of {total} calls"

"""MLX's own kernels as a test of the simulator: how MLX launches them, and what they compute."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

HERE = Path(__file__).resolve().parent
LOOPED_LIMIT = 4096  # MLX's RMS_LOOPED_LIMIT: longer rows take the looped kernels
MAX_THREADS = 1024


class Case(NamedTuple):
    """One launch.

    Attributes:
        kernel: name of the instantiation.
        source: name of the .metal file.
        x: input, float32, float16, bfloat16 or int32.
        shape: of the output, of the input's dtype.
        bytes: scalar arguments by buffer index.
        threadgroups: of the grid.
        threads: of a threadgroup.
        expected: float64.
        tolerance: relative to the largest expected value along the last axis.
        floor: least value that ``tolerance`` is relative to.
    """

    kernel: str
    source: str
    x: mx.array
    shape: tuple[int, ...]
    bytes: dict[int, bytes]
    threadgroups: tuple[int, int, int]
    threads: tuple[int, int, int]
    expected: np.ndarray
    tolerance: float
    floor: float = 1e-30

    def text(self) -> str:
        return (HERE / f"{self.source}.metal").read_text()

    def error(self, out: mx.array) -> float:
        """Largest error relative to ``tolerance``; inf where the output is not finite."""
        got = np.array(out.astype(mx.float32)).astype(np.float64).reshape(self.expected.shape)
        if not np.isfinite(got).all():
            return np.inf
        scale = np.maximum(np.abs(self.expected).max(-1, keepdims=True), self.floor)
        return float((np.abs(got - self.expected) / scale).max() / self.tolerance)


EPSILON = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2, mx.int32: 1e-12}
NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16", mx.int32: "int32"}


def _input(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    rng = np.random.default_rng(sum(shape))
    x = mx.array((4 * rng.standard_normal(shape)).astype(np.float32)).astype(dtype)
    return x, np.array(x.astype(mx.float32)).astype(np.float64)


def _softmax_threads(size: int) -> int:
    if size > LOOPED_LIMIT:
        return MAX_THREADS
    return -(-size // (4 * 32)) * 32


def softmax(size: int, dtype: mx.Dtype) -> Case:
    rows = 2
    x, x64 = _input((rows, size), dtype)
    e = np.exp(x64 - x64.max(-1, keepdims=True))
    variant = "looped" if size > LOOPED_LIMIT else "block"
    precise = "" if dtype == mx.float32 else "precise_"
    return Case(
        f"{variant}_softmax_{precise}{NAMES[dtype]}", "softmax", x, x.shape,
        {2: struct.pack("i", size)}, (rows, 1, 1), (_softmax_threads(size), 1, 1),
        e / e.sum(-1, keepdims=True), EPSILON[dtype],
    )  # fmt: skip


def logsumexp(size: int, dtype: mx.Dtype) -> Case:
    rows = 2
    x, x64 = _input((rows, size), dtype)
    top = x64.max(-1, keepdims=True)
    variant = "looped" if size > LOOPED_LIMIT else "block"
    return Case(
        f"{variant}_logsumexp_{NAMES[dtype]}", "logsumexp", x, (rows,),
        {2: struct.pack("i", size)}, (rows, 1, 1), (_softmax_threads(size), 1, 1),
        top[:, 0] + np.log(np.exp(x64 - top).sum(-1)), EPSILON[dtype],
    )  # fmt: skip


def scan(size: int, kind: str = "inclusive", dtype: mx.Dtype = mx.float32) -> Case:
    """Cumulative sum of rows; ``kind`` is inclusive, exclusive or reverse_inclusive."""
    rows = 2
    x, x64 = _input((rows, size), dtype)
    expected = _cumulative(x64, kind, -1)
    threads = MAX_THREADS if size > 4 * MAX_THREADS else -(-size // 128) * 32
    return Case(
        f"contig_{kind}_{NAMES[dtype]}", "scan", x, x.shape, {2: struct.pack("Q", size)},
        (1, rows, 1), (threads, 1, 1), expected, size * EPSILON[dtype] / 8, 1.0,
    )  # fmt: skip


def strided_scan(size: int, stride: int, kind: str = "inclusive") -> Case:
    """Cumulative sum over the first axis of ``[size, stride]``."""
    x, x64 = _input((size, stride), mx.float32)
    blocks = -(-stride // 32)
    return Case(
        f"strided_{kind}_float32", "scan", x, x.shape,
        {2: struct.pack("Q", size), 3: struct.pack("Q", stride), 4: struct.pack("Q", blocks)},
        (1, blocks, 1), (256, 1, 1), _cumulative(x64, kind, 0), 1e-4, 1.0,
    )  # fmt: skip


def _cumulative(x: np.ndarray, kind: str, axis: int) -> np.ndarray:
    if kind == "reverse_inclusive":
        return np.flip(np.cumsum(np.flip(x, axis), axis), axis)
    total = np.cumsum(x, axis)
    return total - x if kind == "exclusive" else total


def all_reduce(size: int, op: str = "sum", dtype: mx.Dtype = mx.float32) -> Case:
    x, x64 = _input((size,), dtype)
    threads = min(MAX_THREADS, -(-size // 128) * 32)
    expected = np.array([x64.max() if op == "max" else x64.sum()])
    scale = max(abs(x64).sum() / abs(expected[0]), 1)
    return Case(
        f"all_{op}_{NAMES[dtype]}", "reduce", x, (1,),
        {2: struct.pack("Q", size), 3: struct.pack("Q", size)},
        (1, 1, 1), (threads, 1, 1), expected, EPSILON[dtype] * scale,
    )  # fmt: skip


def row_reduce(rows: int, size: int, op: str = "sum") -> Case:
    """``rows`` is a multiple of 4, the rows that a threadgroup reduces."""
    x, x64 = _input((rows, size), mx.float32)
    threads = max(32, min(MAX_THREADS, -(-size // 128) * 32))
    expected = x64.max(-1) if op == "max" else x64.sum(-1)
    return Case(
        f"row_{op}_float32", "reduce", x, (rows,),
        {2: struct.pack("Q", size), 3: struct.pack("q", rows)},
        (1, rows // 4, 1), (threads, 1, 1), expected, 1e-4,
    )  # fmt: skip


def run(case: Case, source: Callable[[str], str] = lambda text: text) -> mx.array:
    """Launches a case; ``source`` may change the text."""
    from .. import simulator

    (out,) = simulator.launch(
        source(case.text()), case.kernel, name=f"mlx_{case.source}",
        inputs={0: case.x}, outputs={1: (case.shape, case.x.dtype)}, bytes=case.bytes,
        threadgroups=case.threadgroups, threads=case.threads,
    )  # fmt: skip
    mx.eval(out)
    return out

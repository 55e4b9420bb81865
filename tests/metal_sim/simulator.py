"""The simulator as tests use it: operations, single kernels, options, reports and counters."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import mlx.core as mx

from . import toolchain

ORDERS = ("forward", "reverse", "random")
VARIANTS = ("auto", "sequence", "split")
LIBRARY = "exactspec"
"""What the operations' host code calls its library of kernels."""


class Report(NamedTuple):
    """A defect that the simulator found.

    Attributes:
        kind: such as ``"threadgroup race"``; docs/metal_sim.md lists them.
        kernel: in which it happened.
        message: what happened.
        place: ``file:line`` of the access; empty where the host is at fault.
        other_place: of the access it races with.
    """

    kind: str
    kernel: str
    message: str
    place: str = ""
    other_place: str = ""

    def __str__(self) -> str:
        places = f" at {self.place}" if self.place else ""
        places += f", earlier access at {self.other_place}" if self.other_place else ""
        return f"[{self.kind}] {self.kernel}: {self.message}{places}"


@functools.lru_cache
def _module(name: str) -> ModuleType:
    """A module of the extension: its controls, or the operations' own bindings."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(toolchain.build_extension()))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.lru_cache
def _controls() -> ModuleType:
    controls = _module("_metal_sim")
    controls.set_compiler(_compile)
    return controls


_changes: list[Callable[[str], str]] = []


def _compile(name: str, source: str) -> str:
    if name == LIBRARY:
        for change in _changes:
            source = change(source)
    return str(toolchain.compile_library(name, source))


@contextlib.contextmanager
def changed_shader(change: Callable[[str], str]) -> Iterator[None]:
    """Inside the block, operations run with a changed shader; evaluate before leaving it."""
    controls = _controls()
    _changes.append(change)
    controls.clear_library(LIBRARY)
    try:
        yield
    finally:
        _changes.pop()
        controls.clear_library(LIBRARY)


# Patches of two threads that overlap would leave the later one's behind.
_patching = threading.RLock()


def _operation(name: str, module: str = "exactspec.ops"):
    def call(*args, **kwargs):
        operations = importlib.import_module(module)
        _controls()
        with _patching, mock.patch.object(operations, "_ext", _module("_ext")):
            return getattr(operations, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"``exactspec.{name}``, evaluated by the Metal host code and shaders."
    return call


verify_draft = _operation("verify_draft")
sample = _operation("sample")
verify_tree = _operation("verify_tree", "exactspec.tree")


@contextlib.contextmanager
def options(
    *,
    order: str = "forward",
    seed: int = 0,
    shadow: bool = True,
    max_threads_per_threadgroup: int = 1024,
    thread_execution_width: int = 32,
    variant: str = "auto",
    max_threads: int = 0,
) -> Iterator[None]:
    """How what is evaluated inside the block runs; evaluate before leaving it.

    Args:
        order: in which threads, simdgroups and threadgroups run, and in which lanes add up.
        seed: of the random order.
        shadow: check for races and reads of unwritten memory. Bounds are checked always.
        max_threads_per_threadgroup: of every pipeline.
        thread_execution_width: what every pipeline reports; simdgroups have 32 threads anyway.
        variant: of the operations: ``"sequence"`` or ``"split"``; ``"auto"`` leaves the choice.
        max_threads: per threadgroup of the operations; 0 leaves the choice.
    """
    controls = _controls()
    controls.set_options(
        ORDERS.index(order), seed, shadow, max_threads_per_threadgroup, thread_execution_width
    )
    controls.set_tuning(VARIANTS.index(variant), max_threads)
    try:
        yield
    finally:
        controls.set_options(0, 0, True, 1024, 32)
        controls.set_tuning(0, 0)


def launch(
    source: str,
    kernel: str,
    *,
    inputs: dict[int, mx.array],
    outputs: dict[int, tuple[Sequence[int], mx.Dtype]],
    threadgroups: tuple[int, int, int],
    threads: tuple[int, int, int],
    bytes: dict[int, bytes] | None = None,
    constants: dict[int, tuple[str, float]] | None = None,
    threadgroup_memory: dict[int, int] | None = None,
    name: str = "test",
) -> list[mx.array]:
    """Runs one kernel of Metal source by way of the host interface.

    Args:
        source: Metal; compiled on first use.
        kernel: name of the kernel or of its instantiation.
        inputs: arrays by buffer index.
        outputs: shape and dtype by buffer index.
        threadgroups: of the grid.
        threads: of a threadgroup.
        bytes: what ``set_bytes`` sets, by buffer index.
        constants: function constants by index: type (bool, int, uint or float) and value.
        threadgroup_memory: bytes by index of the threadgroup argument.
        name: of the library, in file names.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return _controls().launch(
        f"{name}-{digest}",
        source,
        kernel,
        list(inputs.items()),
        [(index, list(shape), dtype) for index, (shape, dtype) in outputs.items()],
        list((bytes or {}).items()),
        [(index, kind, float(value)) for index, (kind, value) in (constants or {}).items()],
        list((threadgroup_memory or {}).items()),
        threadgroups,
        threads,
    )


def take_reports() -> list[Report]:
    """What was found since the last call; each place of the code once."""
    return [
        Report(
            r["kind"],
            r["kernel"],
            r["message"],
            _place(r["library"], r["offset"]),
            _place(r["library"], r["other_offset"]),
        )
        for r in _controls().take_reports()
    ]


def take_calls() -> list[dict]:
    """Counters of the calls that ran since the last time: dispatches and buffers of each."""
    return _controls().take_calls()


def check() -> None:
    """Raises AssertionError if anything was found since the last look."""
    reports = take_reports()
    assert not reports, "\n".join(map(str, reports))


@functools.lru_cache(maxsize=1024)
def _place(library: str, offset: int) -> str:
    if not offset:
        return ""
    if not shutil.which("addr2line"):
        return f"{Path(library).name}+{offset:#x}"
    out = subprocess.run(
        ["addr2line", "-e", library, hex(offset)], capture_output=True, text=True
    ).stdout.split()
    return Path(out[0]).name if out else ""

"""Faults that are planted to see whether the simulator finds them.

``python -m metal_sim.faults`` (in tests/) prints the table of docs/metal_sim.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from . import mlx_kernels, simulator
from .toolchain import mlx_include

HERE = Path(__file__).resolve().parent
BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\(mem_flags::mem_\w+\);")
WRONG_OUTPUT = "wrong output"


NOT_A_FAULT = ""


class Fault(NamedTuple):
    """A planted fault.

    Attributes:
        name: unique.
        found_as: kind of the report that must come in every order; ``WRONG_OUTPUT`` where only the
            comparison with the oracle can tell.
        run: runs the faulty code; returns the kernel's name and whether its output is right, which
            is None where the fault leaves nothing to compare with.
    """

    name: str
    found_as: str
    run: Callable[[], tuple[str, bool | None]]


class Finding(NamedTuple):
    """What came of a fault in one order."""

    kinds: frozenset[str]
    right_output: bool | None


def examine(fault: Fault, order: str) -> Finding:
    """Runs a fault; the kernel it is planted in must have run."""
    simulator.take_reports()  # of others
    simulator.take_calls()
    with simulator.options(order=order, seed=1):
        kernel, right = fault.run()
    reports = simulator.take_reports()
    ran = [d["kernel"] for call in simulator.take_calls() for d in call["dispatches"]]
    assert ran == [kernel] or any(r.kernel == kernel for r in reports), (fault.name, ran)
    return Finding(frozenset(r.kind for r in reports), right)


# MLX's own kernels, one change each.

KERNELS = "mlx/backend/metal/kernels/"
CASES = {
    "softmax_single_row": lambda: mlx_kernels.softmax(4096, mx.float32),
    "softmax_looped": lambda: mlx_kernels.softmax(5001, mx.float32),
    "logsumexp": lambda: mlx_kernels.logsumexp(4096, mx.float32),
    "logsumexp_looped": lambda: mlx_kernels.logsumexp(5001, mx.float32),
    "contiguous_scan": lambda: mlx_kernels.scan(5001),
    "strided_scan": lambda: mlx_kernels.strided_scan(70, 40),
    "all_reduce": lambda: mlx_kernels.all_reduce(5000),
    "threadgroup_reduce": lambda: mlx_kernels.row_reduce(4, 1000),
}
"""By the function that a change is in: the launch that reaches it."""


SUPERFLUOUS = {("strided_scan", 1), ("strided_scan", 3)}
"""Barriers that MLX could do without: on both sides a thread touches only elements of its own."""


def _in_mlx(header: str, change: Callable[[str], str], case: Callable[[], mlx_kernels.Case]):
    """Runs a case with ``header`` replaced by a changed copy."""
    original = (mlx_include() / KERNELS / header).read_text()
    changed = change(original)
    assert changed != original, header

    def source(text: str) -> str:
        include = f'#include "{KERNELS}{header}"'
        assert include in text, header
        return text.replace(include, changed)

    def run() -> tuple[str, bool]:
        c = case()
        return c.kernel, c.error(mlx_kernels.run(c, source)) <= 1

    return run


def removed_barriers() -> Iterator[Fault]:
    """Each barrier of MLX's softmax, logsumexp, scan and reductions taken out."""
    headers = (
        "softmax.h",
        "logsumexp.h",
        "scan.h",
        "reduction/reduce_all.h",
        "reduction/reduce_row.h",
    )
    for header in headers:
        text = (mlx_include() / KERNELS / header).read_text()
        counts: dict[str, int] = {}
        for match in BARRIER.finditer(text):
            before = text[: match.start()]
            functions = re.findall(r"(?:\[\[kernel\]\]|METAL_FUNC) void (\w+)\(", before)
            function = functions[-1]
            if function not in CASES:
                continue
            counts[function] = counts.get(function, 0) + 1
            start, end = match.span()
            change = lambda t, start=start, end=end: t[:start] + t[end:]  # noqa: E731
            yield Fault(
                f"{function}: barrier {counts[function]} removed",
                NOT_A_FAULT if (function, counts[function]) in SUPERFLUOUS else "threadgroup race",
                _in_mlx(header, change, CASES[function]),
            )


def other_mlx_faults() -> Iterator[Fault]:
    def replaced(old: str, new: str, count: int = 1) -> Callable[[str], str]:
        return lambda text: text.replace(old, new, count)

    guard = "((lid * N_READS + i) < axis_size)"
    too_far = guard.replace("<", "<=")
    short = lambda: mlx_kernels.softmax(33, mx.float32)  # noqa: E731
    yield Fault(
        "softmax_single_row: tail guard reads one lane too far",
        "out-of-bounds read",
        _in_mlx("softmax.h", replaced(f"{guard} ?", f"{too_far} ?"), short),
    )
    yield Fault(
        "softmax_single_row: tail guard writes one lane too far",
        "out-of-bounds write",
        _in_mlx("softmax.h", replaced(f"if {guard} {{", f"if {too_far} {{"), short),
    )
    yield Fault(
        "softmax_single_row: full-width guard off by one",
        "out-of-bounds read",
        _in_mlx(
            "softmax.h",
            replaced(
                "lid * N_READS + N_READS <= axis_size", "lid * N_READS + N_READS <= axis_size + 3"
            ),
            short,
        ),
    )
    yield Fault(
        "softmax_single_row: threadgroup memory not initialised",
        "unwritten memory",
        _in_mlx("softmax.h", replaced("local_max[simd_lane_id] = Limits<AccT>::min;", ""), short),
    )
    yield Fault(
        "softmax_single_row: maximum under a lane condition",
        "simd divergence",
        _in_mlx(
            "softmax.h",
            replaced(
                "maxval = simd_max(maxval);", "if (simd_lane_id < 16) maxval = simd_max(maxval);"
            ),
            short,
        ),
    )
    yield Fault(
        "softmax_single_row: barrier under a simdgroup condition",
        "barrier divergence",
        _in_mlx(
            "softmax.h",
            replaced("threadgroup_barrier(", "if (simd_group_id == 0) threadgroup_barrier("),
            CASES["softmax_single_row"],
        ),
    )
    yield Fault(
        "logsumexp: wrong tail mask",
        WRONG_OUTPUT,
        _in_mlx(
            "logsumexp.h",
            replaced("AccT(in[i]) : Limits<AccT>::min", "AccT(in[i]) : AccT(0)"),
            lambda: mlx_kernels.logsumexp(33, mx.float32),
        ),
    )
    yield Fault(
        "contiguous_scan: prefix of the wrong simdgroup",
        WRONG_OUTPUT,
        _in_mlx(
            "scan.h",
            replaced("simd_group_id == simd_groups - 1 &&", "simd_group_id == simd_groups - 2 &&"),
            CASES["contiguous_scan"],
        ),
    )


# Small kernels with one fault each.


def _planted(
    kernel: str,
    expected: Callable[[mx.array], mx.array] | None = None,
    view: Callable[[mx.array], mx.array] | None = None,
    **changes,
):
    """Runs a kernel of planted.metal on 1..64; ``changes`` are arguments of ``launch``."""

    def run() -> tuple[str, bool | None]:
        x = mx.arange(64, dtype=mx.float32) + 1
        x = view(x) if view else x
        arguments = {
            "inputs": {0: x},
            "outputs": {1: ((64,), mx.float32)},
            "threadgroups": (1, 1, 1),
            "threads": (64, 1, 1),
            **changes,
        }
        source = (HERE / "planted.metal").read_text()
        (out,) = simulator.launch(source, kernel, name="planted", **arguments)
        mx.eval(out)
        return kernel, bool(mx.array_equal(out, expected(x))) if expected else None

    return run


PARAMS = struct.pack("Ifq", 64, 1.0, 64)
SOUND = {"bytes": {2: PARAMS}, "constants": {0: ("bool", 1)}}


def sound() -> Fault:
    """No fault at all: the launch that the faulty ones differ from."""
    return Fault("none", NOT_A_FAULT, _planted("sound", lambda x: x[::-1], **SOUND))


def planted() -> Iterator[Fault]:
    for kernel, found_as in (
        ("no_barrier", "threadgroup race"),
        ("barrier_of_the_wrong_memory", "threadgroup race"),
        ("simdgroup_barrier_across_simdgroups", "threadgroup race"),
        ("no_barrier_within_a_simdgroup", "threadgroup race"),
        ("write_after_read", "threadgroup race"),
        ("plain_access_to_an_atomic", "threadgroup race"),
        ("atomic_load_without_barrier", "threadgroup race"),
        ("device_race_within_a_threadgroup", "device race"),
        ("divergent_barrier", "barrier divergence"),
        ("different_barriers", "barrier divergence"),
        ("divergent_simd_sum", "simd divergence"),
        ("simd_sum_after_return", "simd divergence"),
        ("shuffle_from_an_inactive_lane", "inactive lane"),
        ("broadcast_from_different_lanes", "non-uniform broadcast"),
        ("read_past_the_end", "out-of-bounds read"),
        ("write_past_the_end", "out-of-bounds write"),
        ("read_in_front", "out-of-bounds read"),
        ("read_far_away", "out-of-bounds read"),
        ("threadgroup_past_the_end", "out-of-bounds write"),
        ("write_to_an_input", "write to an input"),
        ("misaligned_vector", "misaligned access"),
        ("unwritten_threadgroup_memory", "unwritten memory"),
        ("unwritten_device_memory", "unwritten memory"),
        ("unwritten_output", "unwritten output"),
        ("too_much_threadgroup_memory", "threadgroup memory"),
    ):
        yield Fault(kernel.replace("_", " "), found_as, _planted(kernel))
    yield Fault(
        "device race across threadgroups",
        "device race",
        _planted("device_race_across_threadgroups", threadgroups=(2, 1, 1)),
    )
    yield Fault(
        "read between rows",
        "out-of-bounds read",
        _planted(
            "read_between_rows",
            view=lambda x: mx.as_strided(mx.concatenate([x, x]), (64,), (2,)),
        ),
    )
    yield Fault(
        "unwritten variable",
        WRONG_OUTPUT,
        _planted("unwritten_variable", lambda x: mx.cumsum(x) - x),
    )
    # Host and shader disagree.
    yield Fault(
        "host: params of the wrong size",
        "argument size",
        _planted("sound", constants={0: ("bool", 1)}, bytes={2: PARAMS[:-4]}),
    )
    yield Fault(
        "host: params not set", "unbound argument", _planted("sound", constants={0: ("bool", 1)})
    )
    yield Fault(
        "host: function constant not set",
        "function constant",
        _planted("sound", bytes={2: PARAMS}),
    )
    yield Fault(
        "host: function constant of the wrong type",
        "function constant",
        _planted("sound", bytes={2: PARAMS}, constants={0: ("int", 1)}),
    )
    yield Fault(
        "host: function constant that does not exist",
        "function constant",
        _planted("sound", bytes={2: PARAMS}, constants={0: ("bool", 1), 1: ("bool", 1)}),
    )
    yield Fault(
        "host: array of the wrong type",
        "argument type",
        _planted("sound", view=lambda x: x.astype(mx.float16), **SOUND),
    )
    yield Fault(
        "host: buffer bound that the kernel does not have",
        "argument type",
        _planted("device_race_across_threadgroups", bytes={5: PARAMS}),
    )
    yield Fault(
        "host: grid without threads",
        "dispatch size",
        _planted("sound", threadgroups=(0, 1, 1), **SOUND),
    )
    yield Fault(
        "host: too many threads per threadgroup",
        "dispatch size",
        _planted("sound", threads=(2048, 1, 1), **SOUND),
    )


def all_faults() -> list[Fault]:
    return [*removed_barriers(), *other_mlx_faults(), *planted()]


def row(fault: Fault, findings: dict[str, Finding]) -> str:
    """A line of the table: what was reported in every order, and where the output was wrong."""
    kinds = sorted(frozenset.intersection(*(f.kinds for f in findings.values())))
    if any(f.right_output is None for f in findings.values()):
        wrong = "not compared"
    else:
        wrong = ", ".join(o for o, f in findings.items() if not f.right_output) or "nowhere"
    return f"| {fault.name} | {', '.join(kinds) or 'nothing'} | {wrong} |"


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    print("| fault | reported in every order | output wrong in |\n|---|---|---|")
    for planted_fault in all_faults():
        print(row(planted_fault, {o: examine(planted_fault, o) for o in simulator.ORDERS}))

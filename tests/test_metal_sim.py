"""The simulator itself: it runs MLX's own kernels right, and finds planted faults."""

from __future__ import annotations

import re
import shutil
import sys

import exactspec
import mlx.core as mx
import numpy as np
import pytest
from exactspec import Sampling, Typical

if not sys.platform.startswith("linux"):
    pytest.skip("the simulator runs on Linux", allow_module_level=True)

from metal_sim import faults, lint, mlx_kernels, simulator, toolchain  # noqa: E402
from metal_sim.language_errors import ERRORS, KERNEL, PRELUDE  # noqa: E402
from metal_sim.translate import TranslationError, translate  # noqa: E402

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@pytest.fixture(autouse=True)
def fresh():
    """No report of an earlier test."""
    mx.set_default_device(mx.cpu)
    simulator.take_reports()
    simulator.take_calls()


# MLX's own kernels: right in every order, and nothing to report.

SOUND_CASES = [
    *(
        mlx_kernels.softmax(size, dtype)
        for size in (1, 31, 33, 1000, 4096, 5001)
        for dtype in FLOATS
    ),
    *(
        mlx_kernels.logsumexp(size, dtype)
        for size in (1, 31, 33, 1000, 4096, 5001)
        for dtype in FLOATS
    ),
    *(mlx_kernels.scan(5001, kind) for kind in ("inclusive", "exclusive", "reverse_inclusive")),
    mlx_kernels.scan(9000, dtype=mx.int32),
    *(mlx_kernels.strided_scan(*shape) for shape in ((1, 1), (33, 31), (70, 40))),
    mlx_kernels.strided_scan(70, 40, "exclusive"),
    *(mlx_kernels.all_reduce(size, op) for size in (1, 31, 1000, 5000) for op in ("sum", "max")),
    mlx_kernels.all_reduce(1000, dtype=mx.int32),
    *(mlx_kernels.row_reduce(*shape) for shape in ((4, 1), (8, 33), (4, 1000))),
]


@pytest.mark.quick(order=["random"])
@pytest.mark.parametrize("order", simulator.ORDERS)
@pytest.mark.parametrize("case", SOUND_CASES, ids=lambda c: f"{c.kernel}-{c.x.shape}")
def test_mlx_kernels_are_right_and_sound(case, order):
    with simulator.options(order=order, seed=7):
        out = mlx_kernels.run(case)
    assert case.error(out) <= 1
    simulator.check()
    (call,) = simulator.take_calls()
    assert [d["kernel"] for d in call["dispatches"]] == [case.kernel]


def test_mlx_scan_of_a_short_row_reads_unwritten_memory():
    """A true report: MLX scans 32 entries whatever the number of simdgroups; it drops the rest."""
    case = mlx_kernels.scan(1000)
    out = mlx_kernels.run(case)
    assert case.error(out) <= 1
    assert {r.kind for r in simulator.take_reports()} == {"unwritten memory"}


def test_full_vocabulary_without_shadow_memory():
    case = mlx_kernels.softmax(152064, mx.float32)
    with simulator.options(shadow=False):
        out = mlx_kernels.run(case)
    assert case.error(out) <= 1
    simulator.check()
    (call,) = simulator.take_calls()
    counters = {b["name"]: b for b in call["buffers"]}
    size = case.x.nbytes
    assert counters["input 0"]["read"] == 2 * size  # the looped variant reads twice
    assert counters["input 0"]["unique_read"] == size
    assert counters["output 0"]["written"] == counters["output 0"]["unique_written"] == size


# Planted faults.


@pytest.mark.quick(fault=[fault.name for fault in faults.planted()])
@pytest.mark.parametrize("fault", faults.all_faults(), ids=lambda f: f.name.replace(" ", "_"))
def test_planted_faults_are_found(fault):
    findings = {order: faults.examine(fault, order) for order in simulator.ORDERS}
    for order, finding in findings.items():
        if fault.found_as == faults.NOT_A_FAULT:
            assert not finding.kinds and finding.right_output, order
        elif fault.found_as == faults.WRONG_OUTPUT:
            assert not finding.kinds and finding.right_output is False, order
        else:
            assert fault.found_as in finding.kinds, (order, finding.kinds)
    # The documentation shows what was found.
    assert faults.row(fault, findings) in (toolchain.ROOT / "docs" / "metal_sim.md").read_text()


@pytest.mark.parametrize("order", simulator.ORDERS)
def test_the_launch_that_faults_are_planted_in_is_sound(order):
    finding = faults.examine(faults.sound(), order)
    assert finding == faults.Finding(frozenset(), True)


@pytest.mark.skipif(not shutil.which("addr2line"), reason="addr2line (binutils) is not installed")
def test_reports_name_the_line():
    next(f for f in faults.planted() if f.name == "no barrier").run()
    report = next(r for r in simulator.take_reports() if r.kind == "threadgroup race")
    text = (faults.HERE / "planted.metal").read_text().splitlines()
    lines = [int(place.rsplit(":", 1)[1]) for place in (report.place, report.other_place)]
    found = {text[line - 1].strip() for line in lines}
    assert found == {"row[i] = in[i];", "out[i] = row[63 - i];"}


# The project's own operations.

VOCAB = 300


def _calls() -> list[dict]:
    """Calls that between them run every kernel and most of their branches."""
    rng = np.random.default_rng(0)
    batch, slots = 2, 2
    target = mx.array(3 * rng.standard_normal((batch, slots + 1, 5000)).astype(np.float32))
    draft = mx.array(3 * rng.standard_normal((batch, slots, 5000)).astype(np.float32))
    tokens = mx.argmax(draft, -1).astype(mx.int32)
    uniforms = mx.array([[0.01, 0.99, 0.5, 0.5], [0.99, 0.01, 0.3, 0.9]])
    dense = dict(target_logits=target, draft_tokens=tokens, draft_logits=draft, uniforms=uniforms)
    onehot = dict(target_logits=target, draft_tokens=tokens, uniforms=uniforms)
    coupled = dict(target_logits=target, draft_tokens=tokens, rule="coupled")
    coupled |= dict(keys=mx.array([[1, 2], [3, 4]], mx.uint32), positions=mx.array([5, 60]))
    vocab = mx.array(rng.permutation(VOCAB).astype(np.int32))
    small_tokens = mx.argmax(draft[..., :VOCAB], -1)
    mapped = dict(
        target_logits=target[..., :VOCAB],
        draft_logits=draft[..., :VOCAB],
        draft_vocab=vocab,
        draft_tokens=vocab[small_tokens],
        uniforms=uniforms,
    )
    vocab = mx.concatenate([vocab[:200], vocab[:100]])
    repeated = dict(mapped, draft_vocab=vocab, draft_tokens=vocab[small_tokens])
    # Neither target nor draft can give the tokens, and there is no residual: drawn from the target.
    impossible = dict(
        target_logits=target,
        draft_logits=target[:, :slots],
        draft_tokens=mx.argmin(target[:, :slots], -1).astype(mx.int32),
        uniforms=uniforms,
        sampling=Sampling(top_k=20),
    )
    return [
        dense,
        dict(dense, stats=True),
        impossible,
        onehot,
        mapped,
        dict(mapped, stats=True),
        repeated,
        dict(repeated, stats=True),
        dict(dense, sampling=Sampling(top_k=20, top_p=0.9)),
        dict(dense, sampling=Sampling(top_k=50, top_p=0.9, min_p=0.01, order="sequential")),
        dict(dense, sampling=Sampling(min_p=0.05), logprobs="raw"),
        dict(dense, sampling=Sampling(temperature=0.0)),
        dict(
            onehot, sampling=Sampling(0.7, top_p=0.8, order="temperature_last"), logprobs="filtered"
        ),
        dict(onehot, sampling=Sampling(top_k=2)),
        dict(dense, rule="block"),
        dict(repeated, rule="block"),
        dict(onehot, rule=Typical(), sampling=Sampling(top_k=20)),
        coupled,
        dict(coupled, sampling=Sampling(top_p=0.9)),
        *_trees(target, draft),
    ]


def _trees(target: mx.array, draft: mx.array) -> list[dict]:
    """Trees in which several siblings are rejected before one is accepted, or none is."""
    rows = mx.array([0, 0, 0, 1, 1])
    parents = mx.array([[-1, -1, -1, 2, 2]] * 2)
    target = mx.take(target, mx.array([0, 1, 2, 1, 0, 2]), axis=1)
    draft = mx.take(draft, mx.array([0, 1, 0, 1, 0, 1]), axis=1)
    best = mx.argsort(-draft[:, rows], axis=-1)
    tokens = mx.stack([best[:, i, i % 3] for i in range(5)], axis=1).astype(mx.int32)
    coins = mx.array([[0.99, 0.99, 0, 0.99, 0.99], [0.99, 0.9, 0.99, 0.9, 0]])
    uniforms = mx.concatenate([coins, mx.array([[0.3, 0.6], [0.8, 0.2]])], axis=1)
    dense = dict(target_logits=target, draft_tokens=tokens, parents=parents, uniforms=uniforms)
    onehot = dict(dense)
    dense["draft_logits"] = draft
    vocab = mx.concatenate([mx.arange(200), mx.arange(100)]).astype(mx.int32) * 3
    mapped = dict(
        dense,
        target_logits=target[..., : 3 * VOCAB],
        draft_logits=draft[..., :VOCAB],
        draft_vocab=vocab,
        draft_tokens=vocab[tokens % VOCAB],
    )
    # Nothing is left of what target and draft share: the target stays as it is.
    equal = dict(dense, draft_logits=target, uniforms=mx.ones_like(uniforms) * 0.999)
    filtered = dict(sampling=Sampling(top_k=20, top_p=0.9))
    return [
        dense,
        dict(dense, replacement=False, logprobs="raw"),
        dict(dense, replacement=False, **filtered),
        dict(mapped, replacement=False),
        dict(equal, sampling=Sampling(top_k=3), replacement=False),
        onehot,
        dict(onehot, logprobs="filtered", **filtered),
    ]


def _operation(call: dict) -> str:
    return "verify_tree" if "parents" in call else "verify_draft"


def _run(call: dict, **options) -> list[np.ndarray]:
    with simulator.options(**options):
        result = getattr(simulator, _operation(call))(**call)
        arrays = [x for x in result if isinstance(x, mx.array)]
        arrays += list(getattr(result, "stats", None) or ())
        mx.eval(*arrays)
    return [np.array(a) for a in arrays]


@pytest.mark.parametrize("variant", ["sequence", "split"])
def test_operations_give_the_same_bits_in_every_order(variant):
    for call in _calls():
        expected = getattr(exactspec, _operation(call))(**call)
        results = [
            _run(call, order=order, seed=3, variant=variant, max_threads=threads)
            for order in simulator.ORDERS
            for threads in (32, 96)
        ]
        simulator.check()
        np.testing.assert_array_equal(results[0][0], np.array(expected.tokens))
        for other in results[1:]:
            for a, b in zip(results[0], other):
                np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_every_kernel_of_the_operations_runs():
    for call in _calls():
        for variant in ("sequence", "split"):
            _run(call, variant=variant)
    ran = {d["kernel"] for call in simulator.take_calls() for d in call["dispatches"]}
    source = toolchain.preprocess(toolchain.shader_source(), toolchain.BUILD / "shader.metal")
    assert ran == set(translate(source, name="all").kernels)


def test_each_row_is_read_once():
    """Without filters, a one-hot draft: the rows once, then the block that is drawn from."""
    call = next(c for c in _calls() if "draft_logits" not in c)
    _run(call, variant="split")
    (counters,) = simulator.take_calls()
    logits = next(b for b in counters["buffers"] if b["name"] == "input 0")
    size = call["target_logits"].nbytes
    assert logits["unique_read"] == size
    assert size <= logits["read"] < 1.6 * size


BARRIER = re.compile(r"threadgroup_barrier\([^;]*\);")


# Here only counted: the text that is compiled has them all, in another order.
NUM_BARRIERS = sum(
    len(BARRIER.findall(path.read_text())) for path in (toolchain.ROOT / "metal").glob("*.*")
)


def _barrier_runs():
    for call in _calls():
        for variant in ("sequence", "split"):
            yield call, {"variant": variant, "order": "random", "seed": 1, "max_threads": 64}


@pytest.fixture(scope="module")
def sound_results():
    return [_run(call, **options) for call, options in _barrier_runs()]


@pytest.mark.prove
@pytest.mark.parametrize("number", range(NUM_BARRIERS))
def test_a_removed_barrier_of_the_shaders_is_noticed(number, sound_results):
    """By reports or other bits."""
    source = toolchain.shader_source()
    barriers = list(BARRIER.finditer(source))
    assert len(barriers) == NUM_BARRIERS
    start, end = barriers[number].span()
    with simulator.changed_shader(lambda text: text[:start] + text[end:]):
        for (call, options), expected in zip(_barrier_runs(), sound_results):
            results = _run(call, **options)
            same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results, expected))
            if simulator.take_reports() or not same:
                return
    line = source.count("\n", 0, start) + 1
    pytest.fail(f"the barrier of line {line} of the shader's text can go unnoticed")


# Translation and static checks.


@pytest.mark.parametrize(
    "source, message",
    [
        ("kernel int k(device int* a) { return 1; }", "must return void"),
        ("kernel void k(device int* a);", "where they are defined"),
        ('template [[host_name("a")]] [[kernel]] void k<int>(device int*);', "unknown kernel"),
        ("kernel void k(device int* a) { __local int x = 1; }", "no initialiser"),
        ("kernel void k(device int* a [[vertex_id]]) {}", "not supported"),
        ("float f() { return metal::float2(1.0f, 2.0f).x; }", "without a namespace"),
    ],
)
def test_source_outside_the_subset_is_refused(source, message):
    with pytest.raises(TranslationError, match=message):
        translate(source, name="test")


def test_the_shaders_pass_the_static_checks():
    assert lint.check(toolchain.shader_source()) == []


def test_static_checks_accept_sound_source():
    assert lint.check(PRELUDE + KERNEL) == []


@pytest.mark.parametrize("error", ERRORS, ids=lambda name: name.replace(" ", "_"))
def test_planted_language_errors_are_found(error):
    assert lint.check(PRELUDE + ERRORS[error] + KERNEL)

"""What only the Metal backend promises, on the simulator: the same bits however a call is spread
over threadgroups, and limits on dispatches and device bytes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import oracle
import pytest
from exactspec import Cascade, Sampling, Typical, sample
from metal_sim import simulator

FILTERS = {
    "temperature": Sampling(0.6),
    "top_k": Sampling(0.6, top_k=20),
    "top_p": Sampling(0.6, top_p=0.9),
    "both": Sampling(0.6, top_k=20, top_p=0.9),
    "sequential": Sampling(0.6, top_k=50, top_p=0.9, order="sequential"),
    "temperature_last": Sampling(0.6, top_k=50, top_p=0.9, min_p=0.01, order="temperature_last"),
    "sequential_untempered": Sampling(0.6, 50, 0.9, 0.01, order="sequential_untempered"),
    "min_p_first": Sampling(0.6, top_p=0.9, min_p=0.01, order="min_p_first"),
}
DRAFTS = ("dense", "stats", "vocab", "repeats", "sparse", "one-hot")
RULES = {
    "token": "token",
    "block": "block",
    "coupled": "coupled",
    "typical": Typical(),
    "cascade": Cascade(0.05),
}
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Variant, threads of a threadgroup, order of execution. The first is what the others must equal.
SPREADS = [
    ("sequence", 512, "forward"),
    ("sequence", 96, "reverse"),
    ("split", 128, "forward"),
    ("split", 32, "random"),
    ("split", 512, "random"),
]


@pytest.fixture(autouse=True)
def _no_reports():
    simulator.take_calls()
    yield
    simulator.check()


def problem(
    batch, num_slots, vocab_size, kind, sampling, dtype=mx.float32, rejected=None, rule="token"
):
    """Arguments of verify_draft for a draft that follows the target closely. With ``rejected`` the
    drafts before that slot are accepted and its own is not (which no cascade promises)."""
    keys = mx.random.split(mx.random.key(vocab_size + num_slots), 5)
    shape = (batch, num_slots, vocab_size)
    target = (2 * mx.random.normal((batch, num_slots + 1, vocab_size), key=keys[0])).astype(dtype)
    logits = (target[:, :num_slots] + 0.3 * mx.random.normal(shape, key=keys[1])).astype(dtype)
    drawn = sample(
        logits.reshape(-1, vocab_size),
        sampling,
        keys=mx.random.split(keys[2], batch * num_slots),
    )
    tokens = drawn.tokens.reshape(batch, num_slots)
    uniforms = mx.random.uniform(shape=(batch, num_slots + 2), key=keys[3])
    if rejected is not None:
        uniforms[:, :rejected] = 0.0
        uniforms[:, rejected:num_slots] = 0.9999
        overrated = mx.argmax(logits[:, rejected] - target[:, rejected], axis=-1)
        tokens[:, rejected] = overrated.astype(mx.int32)
    arguments = {"sampling": sampling, "logprobs": "raw", "rule": RULES[rule]}
    if rule == "coupled":
        noise = {"keys": mx.random.split(keys[3], batch), "positions": mx.arange(batch) * 100}
        arguments |= noise
        for i in range(num_slots if rejected is None else rejected):
            position = noise["positions"] + i
            choice = sample(target[:, i], sampling, rule=rule, **noise | {"positions": position})
            tokens[:, i] = choice.tokens
    else:
        arguments["uniforms"] = uniforms
    if rule in ("token", "typical") and rejected is not None:
        tokens[:, :rejected] = mx.argmax(target[:, :rejected], axis=-1).astype(mx.int32)
    if kind in ("dense", "stats", "vocab", "repeats"):
        arguments["draft_logits"] = logits
    if kind == "stats":
        arguments["draft_stats"] = drawn.row_stats.reshape(batch, num_slots, 4)
    if kind in ("vocab", "repeats"):
        # Half the ids in no order, or a quarter of them twice.
        ids = mx.random.permutation(vocab_size // 2, key=keys[4]).astype(mx.int32) * 2
        if kind == "repeats":
            ids = mx.concatenate([ids[: ids.size // 2]] * 2)
        arguments["draft_vocab"] = ids
        arguments["draft_logits"] = logits[..., : ids.size]
        tokens = mx.take(ids, tokens % ids.size)
    if kind == "sparse":
        others = (tokens[..., None] + mx.array([0, 1, 2100])) % vocab_size
        arguments["draft_ids"] = others.astype(mx.int32)
        arguments["draft_probs"] = mx.broadcast_to(mx.array([0.5, 0.3, 0.2]), others.shape)
    return target, tokens, arguments


# Two nodes that are rejected, one that is accepted, and two below it that are rejected.
TREE = np.array([-1, -1, -1, 2, 2])


def tree_problem(batch, vocab_size, kind, sampling, dtype=mx.float32, replacement=True):
    """Arguments of verify_tree. The first sequence goes as ``TREE`` says, unless ids are mapped."""
    keys = mx.random.split(mx.random.key(vocab_size), 4)
    N = len(TREE)
    target = (2 * mx.random.normal((batch, N + 1, vocab_size), key=keys[0])).astype(dtype)
    draft = (target + 0.3 * mx.random.normal(target.shape, key=keys[1])).astype(dtype)
    underrated = mx.softmax(target / 0.6, axis=-1) - mx.softmax(draft / 0.6, axis=-1)
    order = mx.argsort(underrated, axis=-1).astype(mx.int32)[:, mx.array(TREE + 1)]
    ranks = mx.array([0, 1, -1, 0, 1])
    tokens = mx.stack([order[:, node, ranks[node]] for node in range(N)], axis=1)
    uniforms = mx.random.uniform(shape=(batch, N + 2), key=keys[2])
    uniforms[0, :N] = mx.array([0.9999, 0.9999, 0.0, 0.9999, 0.9999])
    arguments = {
        "parents": mx.array(np.tile(TREE, (batch, 1)), mx.int32),
        "sampling": sampling,
        "uniforms": uniforms,
        "logprobs": "raw",
        "replacement": replacement,
    }
    if kind in ("dense", "stats", "vocab", "repeats"):
        arguments["draft_logits"] = draft
    if kind == "stats":
        rows = sample(
            draft.reshape(-1, vocab_size), sampling, uniforms=mx.zeros((batch * (N + 1), 2))
        )
        arguments["draft_stats"] = rows.row_stats.reshape(batch, N + 1, 4)
    if kind in ("vocab", "repeats"):
        ids = mx.random.permutation(vocab_size // 2, key=keys[3]).astype(mx.int32) * 2
        if kind == "repeats":
            ids = mx.concatenate([ids[: ids.size // 2]] * 2)
        arguments["draft_vocab"] = ids
        arguments["draft_logits"] = draft[..., : ids.size]
        tokens = mx.take(ids, tokens % ids.size)
    if kind == "sparse":
        # Of each row: the tokens of two children of it, and another id.
        children = [np.flatnonzero(TREE == row - 1)[[0, 1]] if row in (0, 3) else [0, 1]
                    for row in range(N + 1)]  # fmt: skip
        first = tokens[:, mx.array(np.array(children))]
        others = mx.concatenate([first, (first[..., :1] + 2100) % vocab_size], axis=-1)
        arguments["draft_ids"] = others
        arguments["draft_probs"] = mx.broadcast_to(mx.array([0.5, 0.3, 0.2]), others.shape)
    return target, tokens, arguments


def run(target, tokens, arguments, spread, **options):
    variant, max_threads, order = spread
    operation = simulator.verify_tree if "parents" in arguments else simulator.verify_draft
    with simulator.options(variant=variant, max_threads=max_threads, order=order, **options):
        result = operation(target, tokens, **arguments)
        arrays = [x for x in result if isinstance(x, mx.array)]
        arrays += list(getattr(result, "stats", None) or ())
        mx.eval(arrays)
    return [np.array(x) for x in arrays]


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.quick(name=["both"])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("name", FILTERS)
def test_same_bits_however_it_is_spread(kind, name):
    dtype = DTYPES[(len(kind) + len(name)) % 3]
    arguments = problem(2, 3, 5003, kind, FILTERS[name], dtype)
    first = run(*arguments, SPREADS[0])
    for spread in SPREADS[1:]:
        assert_same_bits(first, run(*arguments, spread))


@pytest.mark.quick(name=["sequential"])
@pytest.mark.parametrize("name", ["temperature", "sequential"])
@pytest.mark.parametrize("rule, kind", [
    *(("block", kind) for kind in DRAFTS),
    ("coupled", "dense"),
    ("coupled", "one-hot"),
    ("typical", "sparse"),
    ("typical", "stats"),
    ("cascade", "vocab"),
    ("cascade", "sparse"),
])  # fmt: skip
def test_rules_have_the_same_bits_however_a_call_is_spread(rule, kind, name):
    dtype = DTYPES[(len(kind) + len(name)) % 3]
    arguments = problem(2, 3, 5003, kind, FILTERS[name], dtype, rule=rule)
    first = run(*arguments, SPREADS[0])
    for spread in SPREADS[1:]:
        assert_same_bits(first, run(*arguments, spread))


@pytest.mark.quick(kind=["repeats"])
@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_trees_have_the_same_bits_however_a_call_is_spread(kind, replacement):
    for name in ("temperature", "top_p", "sequential"):
        dtype = DTYPES[(len(kind) + len(name)) % 3]
        arguments = tree_problem(2, 5003, kind, FILTERS[name], dtype, replacement)
        first = run(*arguments, SPREADS[0])
        for spread in SPREADS[1:]:
            assert_same_bits(first, run(*arguments, spread))


@pytest.mark.quick(kind=["sparse"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_statistics_have_the_same_bits_for_every_group_size(kind):
    target, tokens, arguments = problem(2, 2, 4099, kind, FILTERS["both"])
    arguments["stats"] = True
    first = run(target, tokens, arguments, SPREADS[2])
    for spread in SPREADS[3:]:
        assert_same_bits(first, run(target, tokens, arguments, spread))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cannot_be_read_wide_have_the_same_bits(dtype):
    # Rows of 2501 values start at odd addresses; in the padded copy they start at 16-byte ones.
    target, tokens, arguments = problem(2, 2, 2501, "dense", FILTERS["top_p"], dtype)
    first = run(target, tokens, arguments, SPREADS[2])

    def padded(x):
        return mx.pad(x, [(0, 0), (0, 0), (0, 3)], constant_values=60000.0)[..., :2501]

    arguments["draft_logits"] = padded(arguments["draft_logits"])
    assert_same_bits(first, run(padded(target), tokens, arguments, SPREADS[2]))


@pytest.mark.parametrize(
    "limits, got",
    [
        ({"thread_execution_width": 64}, "64 and 1024 threads"),
        ({"max_threads_per_threadgroup": 31}, "32 and 31 threads"),
    ],
    ids=("width", "threads"),
)
def test_a_gpu_without_the_expected_simdgroups_is_an_error(limits, got):
    logits = mx.zeros((1, 5))
    with simulator.options(**limits):
        for result in (
            simulator.sample(logits, uniforms=mx.zeros((1, 2))).tokens,
            simulator.verify_draft(
                logits[None], mx.zeros((1, 0), mx.int32), uniforms=mx.zeros((1, 2))
            ).tokens,
        ):
            with pytest.raises(RuntimeError, match=rf"simdgroups of 32 threads .* got {got}"):
                mx.eval(result)
    assert simulator.take_calls() == []


def spike(size, value, rest=0.0):
    row = np.full(size, rest, np.float32)
    row[size // 2] = value
    return row


def normal(size, scale):
    return scale * np.random.default_rng(size).standard_normal(size).astype(np.float32)


# Rows on which a search for the cut may go wrong: ties within and across blocks, magnitudes that
# overflow a difference or that bins of one width cannot tell apart, rows with hardly any id.
ROWS = {
    "all equal": spike(6001, 0.0),
    "all equal, small": spike(6001, -1e-38, -1e-38),
    "two values": np.where(np.arange(6001) % 3 == 1, np.float32(1), np.float32(0.5)),
    "outlier": spike(4099, 1e30),
    "outlier below": spike(4099, -1e30),
    "widest": np.where(np.arange(4099) % 2 == 1, np.float32(3e38), np.float32(-3e38)),
    "powers": np.float32(2) ** (np.arange(4099) % 250 - 125).astype(np.float32),
    "one finite": spike(4099, -5.0, -np.inf),
    "few finite": np.where(np.arange(4099) % 700 == 3, normal(4099, 2), np.float32(-np.inf)),
    "512 finite": np.where(np.arange(4099) % 8 == 3, np.float32(2), np.float32(-np.inf)),
    "513 finite": np.where(np.arange(4104) % 8 == 3, np.float32(2), np.float32(-np.inf)),
    "near zero": normal(4099, 1e-6),
    "far from zero": np.float32(1e4) + normal(4099, 1),
    "one id": spike(1, 3.0),
    "one id more than a block": normal(2049, 2),
    "normal": normal(9000, 2),
}
TIED = {
    "16-bit normal": normal(9000, 2),
    "16-bit ties": np.round(2 * normal(6001, 1)) / 2,
    "16-bit far from zero": np.float32(100) + normal(9000, 1),
}
CUTS = [(mx.float32, name, row) for name, row in ROWS.items()] + [
    (dtype, name, row) for dtype in (mx.float16, mx.bfloat16) for name, row in TIED.items()
]
CUT_SAMPLINGS = [
    oracle.Sampling(temperature, top_k, top_p, 0.0, order)
    for temperature in (1e-12, 0.7, 100.0)
    for top_k, top_p in ((0, 1e-6), (0, 0.6), (0, 0.999999), (1000, 0.0), (1500, 0.9))
    for order in ("temperature_first", "temperature_last", "sequential")
    if top_k or order == "temperature_first"
] + [
    oracle.Sampling(0.7, 2, 0.5),
    oracle.Sampling(0.7, 0, 0.9, 0.0, "temperature_last"),
    oracle.Sampling(0.7, 1000, 0.9, 0.0, "sequential_untempered"),
    *(
        oracle.Sampling(temperature, top_k, 0.9, min_p, "min_p_first")
        for temperature in (0.7, 100.0)
        for top_k in (0, 1000)
        for min_p in (1e-6, 0.0123)
    ),
]


@pytest.mark.quick(
    name=["two values", "outlier", "widest", "few finite", "512 finite", "one id", "16-bit ties"]
)
@pytest.mark.parametrize("masked", (False, True), ids=("", "masked"))
@pytest.mark.parametrize("dtype, name, row", CUTS, ids=[f"{c[0]}-{c[1]}" for c in CUTS])
def test_cut_of_any_row(dtype, name, row, masked):
    """Kept are exactly the ids that the law keeps, and the normaliser is theirs."""
    logits = mx.array(row).astype(dtype)
    rounded = np.array(logits.astype(mx.float32))
    mask = None
    if masked:
        mask = (np.arange(len(row)) // 5 % 3 != 1) | (rounded == rounded.max())
        bits = np.pad(mask, (0, -len(row) % 32)).reshape(-1, 32)
        words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32).view(np.int32).T
        rounded = np.where(mask, rounded, -np.inf)
    order = np.argsort(-rounded, kind="stable")
    for rule in {s.order for s in CUT_SAMPLINGS}:
        samplings = [s for s in CUT_SAMPLINGS if s.order == rule]
        count = len(samplings)
        fields = [mx.array([s[i] for s in samplings]) for i in range(4)]
        results = []
        for variant, max_threads, execution in SPREADS[::3]:
            with simulator.options(variant=variant, max_threads=max_threads, order=execution):
                result = simulator.sample(
                    mx.broadcast_to(logits, (count, len(row))),
                    Sampling(*fields, order=rule),
                    uniforms=mx.zeros((count, 2)),
                    token_bitmask=mx.broadcast_to(mx.array(words), (count, words.shape[1]))
                    if masked
                    else None,
                )
                mx.eval(result.row_stats)
            results.append(np.array(result.row_stats))
        assert_same_bits(results[:1], results[1:])
        for sampling, stats in zip(samplings, results[0], strict=True):
            check_cut(rounded[order], order, sampling, stats)


def check_cut(logits, ids, sampling, stats):
    """``logits`` [V] and their ``ids`` in the order of the cut."""
    sampling = sampling.of_sequence(0)
    below = oracle.exact(logits) - logits[0].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        tempered = np.exp(below / sampling.temperature)
    measured = np.exp(below) if sampling.order in oracle.UNTEMPERED else tempered
    sure, _, possible = np.minimum(
        oracle.kept_counts(measured, sampling), np.isfinite(logits).sum()
    )
    max_logit, log_norm, cutoff, cutoff_id = stats
    keeps = (logits > cutoff) | ((logits == cutoff) & (ids <= cutoff_id) & np.isfinite(logits))
    kept = keeps.sum()
    assert sure <= kept <= possible, (sampling, sure, kept, possible)
    assert max_logit == logits[0] and keeps[:kept].all()
    np.testing.assert_allclose(log_norm, np.log(tempered[:kept].sum()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["sequence", "split"])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("stats", [False, True])
def test_vocabulary_map_without_slots(variant, rule, stats):
    """No buffer is without elements, which the simulator would report."""
    target = mx.random.normal((2, 1, 50), key=mx.random.key(0))
    given = {"uniforms": mx.full((2, 2), 0.5), "rule": rule, "stats": stats}
    draft = {"draft_logits": mx.zeros((2, 0, 5)), "draft_vocab": mx.arange(5, dtype=mx.int32)}
    with simulator.options(variant=variant):
        result = simulator.verify_draft(target, mx.zeros((2, 0), mx.int32), **draft, **given)
        mx.eval(result)
    wanted = sample(target[:, 0], uniforms=given["uniforms"]).tokens
    assert result.tokens.tolist() == wanted[:, None].tolist()


# At the first rejection the row pair is read again: 2 rows of 9 at K = 4; the block rule reads all
# pairs again, or those from the end to the accepted prefix. Filters read the blocks that can hold
# kept ids once more, and so do the coupled and typical rules then; a nucleus alone, which has more
# candidates than fit on chip, twice.
LIMITS = [
    # rule, filter, draft, dtype, variant, dispatches, bytes of logits over compulsory ones
    ("token", "temperature", "dense", mx.float32, "split", 3, 1.25),
    ("token", "temperature", "vocab", mx.float32, "split", 3, 1.25),
    ("token", "temperature", "one-hot", mx.float32, "split", 2, 1.02),
    ("token", "temperature", "sparse", mx.bfloat16, "split", 2, 1.03),
    ("token", "temperature", "dense", mx.bfloat16, "sequence", 1, 1.35),
    ("token", "temperature", "one-hot", mx.float32, "sequence", 1, 1.02),
    ("token", "both", "dense", mx.float32, "split", 4, 1.5),
    ("token", "both", "one-hot", mx.bfloat16, "split", 3, 1.5),
    ("token", "top_k", "dense", mx.bfloat16, "sequence", 1, 1.5),
    ("token", "top_p", "dense", mx.float32, "split", 4, 3.25),
    ("token", "top_p", "dense", mx.bfloat16, "split", 4, 3.25),
    ("token", "sequential", "dense", mx.float32, "split", 4, 1.8),
    ("token", "sequential_untempered", "dense", mx.float32, "split", 4, 2.25),
    ("token", "sequential_untempered", "one-hot", mx.bfloat16, "split", 3, 2.25),
    ("token", "min_p_first", "dense", mx.float32, "split", 4, 1.9),
    ("token", "min_p_first", "one-hot", mx.bfloat16, "split", 3, 1.9),
    ("block", "temperature", "dense", mx.float32, "split", 3, 1.9),
    ("block", "temperature", "dense", mx.float32, "sequence", 1, 1.5),
    ("block", "temperature", "one-hot", mx.float32, "split", 2, 1.02),
    ("block", "temperature", "sparse", mx.bfloat16, "split", 2, 1.05),
    ("block", "both", "dense", mx.bfloat16, "split", 4, 1.9),
    ("coupled", "temperature", "dense", mx.float32, "split", 2, 1.01),
    ("coupled", "both", "one-hot", mx.bfloat16, "split", 3, 1.7),
    ("coupled", "temperature", "one-hot", mx.float32, "sequence", 1, 1.01),
    ("typical", "temperature", "dense", mx.float32, "split", 2, 1.02),
    ("typical", "both", "one-hot", mx.float32, "split", 3, 1.7),
]


@pytest.mark.parametrize("rule, name, kind, dtype, variant, dispatches, limit", LIMITS)
def test_dispatches_and_device_bytes(rule, name, kind, dtype, variant, dispatches, limit, figure):
    """Rows that must be read: all in the split variant and by the block rule, else those up to the
    rejection; a draft's only where the rule looks at them."""
    num_slots, vocab_size = 4, 152064
    target, tokens, arguments = problem(
        1, num_slots, vocab_size, kind, FILTERS[name], dtype, rejected=2, rule=rule
    )
    del arguments["logprobs"]
    _, num_accepted, *_ = run(target, tokens, arguments, (variant, 0, "forward"), shadow=False)
    (call,) = simulator.take_calls()
    assert num_accepted.item() == 2
    all_rows = variant == "split" or rule == "block"
    reached = num_slots if all_rows else num_accepted.item() + 1
    target_rows = num_slots + 1 if all_rows else reached
    draft_width = arguments["draft_logits"].shape[-1] if "draft_logits" in arguments else 0
    draft_rows = 0 if rule in ("coupled", "typical") else reached
    compulsory = (target_rows * vocab_size + draft_rows * draft_width) * dtype.size
    logits = {"input 0", "input 3"} if draft_width else {"input 0"}
    read = sum(b["read"] for b in call["buffers"] if b["name"] in logits)
    others = sum(b["unique_read"] for b in call["buffers"] if b["name"] not in logits)
    written = sum(b["written"] for b in call["buffers"])
    figure("logits read over compulsory", read / compulsory)
    figure("other bytes over compulsory", (others + written) / compulsory)
    assert len(call["dispatches"]) == dispatches
    assert read <= limit * compulsory
    # A mapped draft: the map itself, and a word per id that is initialised, claimed and filled.
    assert others + written <= (0.6 if kind == "vocab" else 0.05) * compulsory


@pytest.mark.parametrize("name, dispatches, limit", [("temperature", 2, 1.01), ("both", 3, 1.7)])
def test_coupled_sample_reads_its_row_once(name, dispatches, limit, figure):
    vocab_size = 152064
    logits = 2 * mx.random.normal((1, vocab_size), key=mx.random.key(1))
    noise = {"keys": mx.random.key(2)[None], "positions": mx.array([7])}
    with simulator.options(variant="split", shadow=False):
        token = simulator.sample(logits, FILTERS[name], rule="coupled", **noise).tokens
        mx.eval(token)
    (call,) = simulator.take_calls()
    assert token.item() == sample(logits, FILTERS[name], rule="coupled", **noise).tokens.item()
    read = sum(b["read"] for b in call["buffers"] if b["name"] == "input 0")
    figure("logits read over compulsory", read / logits.nbytes)
    assert len(call["dispatches"]) == dispatches
    assert read <= limit * logits.nbytes


# Every rejection reads the pair of rows again, or the blocks of a one-hot or sparse draft's ids.
# Without replacement a draft of known statistics is also read once to measure it.
TREE_LIMITS = [
    # filter, draft, replacement, dtype, variant, dispatches, bytes of logits over compulsory ones
    ("temperature", "dense", True, mx.float32, "split", 2, 2.02),
    ("temperature", "dense", False, mx.float32, "split", 2, 2.02),
    ("temperature", "stats", False, mx.float32, "split", 2, 2.7),
    ("temperature", "one-hot", True, mx.float32, "split", 2, 1.02),
    ("temperature", "sparse", True, mx.bfloat16, "split", 2, 1.05),
    ("temperature", "dense", True, mx.bfloat16, "sequence", 1, 3.1),
    ("temperature", "one-hot", True, mx.float32, "sequence", 1, 1.1),
    ("both", "dense", True, mx.float32, "split", 3, 1.6),
    ("both", "one-hot", True, mx.bfloat16, "split", 3, 1.5),
]


@pytest.mark.parametrize("name, kind, replacement, dtype, variant, dispatches, limit", TREE_LIMITS)
def test_dispatches_and_device_bytes_of_trees(
    name, kind, replacement, dtype, variant, dispatches, limit, figure
):
    """Rows that must be read: the target's, and those of a dense draft that have children; only
    along the path in the variant of one threadgroup."""
    vocab_size = 152064
    target, tokens, arguments = tree_problem(1, vocab_size, kind, FILTERS[name], dtype, replacement)
    del arguments["logprobs"]
    _, path, *_ = run(target, tokens, arguments, (variant, 0, "forward"), shadow=False)
    (call,) = simulator.take_calls()
    assert path.tolist() == [[2, -1, -1, -1, -1]]
    rows = len(TREE) + 1 if variant == "split" else 2
    rows += 2 if "draft_logits" in arguments and kind != "stats" else 0
    compulsory = rows * vocab_size * dtype.size
    logits = {"input 0", "input 3"} if "draft_logits" in arguments else {"input 0"}
    read = sum(b["read"] for b in call["buffers"] if b["name"] in logits)
    others = sum(b["unique_read"] for b in call["buffers"] if b["name"] not in logits)
    written = sum(b["written"] for b in call["buffers"])
    figure("logits read over compulsory", read / compulsory)
    figure("other bytes over compulsory", (others + written) / compulsory)
    assert len(call["dispatches"]) == dispatches
    assert read <= limit * compulsory
    assert others + written <= 0.05 * compulsory

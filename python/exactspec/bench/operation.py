"""The operation beside its peers: verified, then timed, and held against the machine's limits."""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.progress import Progress

from .. import Sampling, _ext, sample
from .peers import OURS, Absent, Peer, make_peers, numpy_arrays
from .report import INTERRUPTED

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

TEMPERATURE = Sampling(0.6)
FILTERS = Sampling(0.6, top_k=20, top_p=0.95)
# Sampling, and the draft.
SETTINGS: dict[str, tuple[Sampling, str]] = {
    "temperature": (TEMPERATURE, "dense"),
    "temperature, stats": (TEMPERATURE, "dense with stats"),
    "temperature, one-hot": (TEMPERATURE, "one-hot"),
    "top_k and top_p": (FILTERS, "dense"),
}

SIZES = [(1, 4, 152064), (1, 4, 49152), (8, 4, 152064), (1, 8, 32000)]
# One number varies at a time, from the first of SIZES.
SWEEPS = [
    *((1, 4, vocab_size) for vocab_size in (8192, 32000, 49152, 100352, 152064, 262144)),
    *((1, num_slots, 152064) for num_slots in (1, 2, 4, 8, 16)),
    *((batch, 4, 152064) for batch in (1, 2, 4, 8)),
]

# Inputs take turns, so that no branch is learnt.
NUM_INPUTS = 4
# Hot, a peer is called so often in its turn, after calls that are not timed: other peers took the
# caches and the branch predictor from its code, and a small call needs several to get them back.
HOT_CALLS, WARM_UP_CALLS, WARM_UP_SECONDS = 3, 12, 5e-3
# Read between calls to leave nothing of the inputs in a cache.
EVICTION_BYTES = 1 << 29

# A slow peer has fewer rounds: no more than fit into this time, but some.
PEER_SECONDS = 1.0
LEAST_ROUNDS = 3

# A law of 7 outcomes, tried LAW_TRIALS times: once in a million for a right peer.
LAW_VOCABULARY = 7
LAW_TRIALS = 2000
LAW_LIMIT = 38.0


class Wrong(ArithmeticError):
    """A peer disagrees, so it was not timed."""


class Case(NamedTuple):
    """What is measured at once.

    Attributes:
        size: B, K, V.
        setting: a key of ``SETTINGS``.
        dtype: of the logits, a key of ``DTYPES``.
        cold: whether nothing of a call is in a cache, neither its inputs nor its code; else the
            peer has just been called several times, and the call's input has been read.
        threads: of the CPU; None on a GPU.
        rounds: timed calls of each peer, at most; hot ones in whole turns of ``HOT_CALLS``.
    """

    size: tuple[int, int, int]
    setting: str
    dtype: str = "float32"
    cold: bool = False
    threads: int | None = None
    rounds: int = 15


def make_inputs(seed: int, case: Case) -> dict[str, mx.array]:
    """Synthetic logits and a draft close to them, rejected at slot K / 2.

    The slots before it hold the target's best token and a coin of 0; slot K / 2 holds a token that
    only the draft likes. What is read depends on where the rejection is, so it is the same for all.
    """
    batch, num_slots, vocab_size = case.size
    sampling, kind = SETTINGS[case.setting]
    half = num_slots // 2
    keys = mx.random.split(mx.random.key(seed), 5)
    target = 2 * mx.random.normal((batch, num_slots + 1, vocab_size), key=keys[0])
    noise = mx.random.normal((batch, num_slots, vocab_size), key=keys[1])
    draft = target[:, :num_slots] + 0.3 * noise
    dtype = DTYPES[case.dtype]
    target, draft = target.astype(dtype), draft.astype(dtype)
    tokens = mx.argmax(target[:, :num_slots], axis=-1).astype(mx.int32)
    unlikely = mx.random.randint(0, vocab_size, (batch,), key=keys[2])
    tokens[:, half] = unlikely
    draft[mx.arange(batch), half, unlikely] = mx.max(draft[:, half], axis=-1) + 1
    uniforms = mx.random.uniform(shape=(batch, num_slots + 2), key=keys[3])
    uniforms[:, :half] = 0.0
    uniforms[:, half] = 0.999
    inputs = {"target_logits": target, "draft_tokens": tokens, "uniforms": uniforms}
    if kind != "one-hot":
        inputs["draft_logits"] = draft
    if kind == "dense with stats":
        rows = draft.reshape(-1, vocab_size)
        row_stats = sample(rows, sampling, keys=mx.random.split(keys[4], len(rows))).row_stats
        inputs["draft_stats"] = row_stats.reshape(batch, num_slots, 4)
    mx.eval(inputs)
    return inputs


def work(case: Case) -> dict[str, int]:
    """Exponentials and bytes that cannot be avoided.

    Every row up to the rejection is normalised, unless its normaliser was handed over; without
    filters, the residual takes both rows of the rejected slot again, since it needs both
    normalisers. Bytes are those of rows read at least once.
    """
    batch, num_slots, vocab_size = case.size
    sampling, kind = SETTINGS[case.setting]
    reached = num_slots // 2 + 1
    normalised = reached if kind != "dense" else 2 * reached
    residual = 2 if kind != "one-hot" and sampling.top_k <= 0 else 0
    read = {"dense": 2 * reached, "dense with stats": reached + 1, "one-hot": reached}[kind]
    return {
        "exps": batch * vocab_size * (normalised + residual),
        "bytes": batch * vocab_size * read * DTYPES[case.dtype].size,
    }


# Verification


def check_tokens(name: str, ours: tuple, theirs: tuple, inputs: dict, same_tokens: bool) -> None:
    """Raise ``Wrong`` unless a peer's results are those of ``verify_draft``, as far as they must.

    Raises:
        Wrong: other numbers of accepted tokens, other accepted tokens, or, of a peer that draws by
            the given uniforms, another last token.
    """
    tokens, num_accepted = (np.array(x) for x in ours)
    peer_tokens, peer_accepted = (np.array(x) for x in theirs)
    if not np.array_equal(num_accepted, peer_accepted):
        raise Wrong(f"{name} accepts {peer_accepted.tolist()} tokens, not {num_accepted.tolist()}")
    emitted = num_accepted[:, None] + same_tokens
    compared = np.arange(tokens.shape[1]) < emitted
    if not np.array_equal(tokens[compared], peer_tokens[compared]):
        raise Wrong(f"{name} emits {peer_tokens.tolist()}, not {tokens.tolist()}")


@functools.cache
def check_laws(make: Callable[..., dict], sampling: Sampling, kind: str) -> None:
    """``check_law`` for every peer that draws its own last token: once a process, for all sizes."""
    few = sampling if sampling.top_k <= 0 else sampling._replace(top_k=4, top_p=0.8)
    for name, peer in make(few, kind).items():
        if isinstance(peer, Peer) and not peer.same_tokens and peer.part is None:
            check_law(name, peer, few, kind)


def check_law(name: str, peer: Peer, sampling: Sampling, kind: str) -> None:
    """Raise ``Wrong`` unless the emitted tokens of many small problems follow the target.

    Every emitted token follows its target row, whatever the draft: a chi-square test of each slot.
    """
    vocab_size, num_slots = LAW_VOCABULARY, 2
    generator = np.random.default_rng(1)
    target = generator.normal(size=(num_slots + 1, vocab_size)).astype(np.float32)
    draft = generator.normal(size=(num_slots, vocab_size)).astype(np.float32)
    laws, proposals = _laws(target, sampling), _laws(draft, sampling)

    def repeated(x):
        return mx.broadcast_to(mx.array(x), (LAW_TRIALS, *x.shape))

    drawn = [generator.choice(vocab_size, LAW_TRIALS, p=law) for law in proposals]
    if kind == "one-hot":
        drawn = [np.full(LAW_TRIALS, law.argmax()) for law in proposals]
    inputs = {
        "target_logits": repeated(target),
        "draft_tokens": mx.array(np.stack(drawn, 1).astype(np.int32)),
        "uniforms": mx.array(generator.random((LAW_TRIALS, num_slots + 2), np.float32)),
    }
    if kind != "one-hot":
        inputs["draft_logits"] = repeated(draft)
    inputs = {name: mx.contiguous(x) for name, x in inputs.items()}
    mx.eval(inputs)
    tokens, num_accepted = (np.array(x) for x in peer.run(peer.prepare(inputs)))
    for slot, law in enumerate(laws):
        emitted = tokens[num_accepted >= slot, slot]
        counts = np.bincount(emitted, minlength=vocab_size)
        expected = law * len(emitted)
        possible = law > 0
        chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
        if counts[~possible].any() or chi_square > LAW_LIMIT:
            raise Wrong(f"{name} has another law at slot {slot}: chi-square {chi_square:.0f}")


def _laws(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Distributions ``[R, V]`` in float64, after temperature, top_k and top_p."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)).astype(float) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    ranked = np.take_along_axis(weights, order, -1)
    before = np.cumsum(ranked, -1) - ranked
    kept = np.ones(weights.shape, bool)
    if sampling.top_k > 0:
        kept[:, sampling.top_k :] = False
    if 0 < sampling.top_p < 1:
        kept &= before < sampling.top_p * ranked.sum(-1, keepdims=True)
    laws = np.zeros_like(weights)
    np.put_along_axis(laws, order, ranked * kept, -1)
    return laws / laws.sum(-1, keepdims=True)


def check_residual(name: str, result: np.ndarray, inputs: dict, sampling: Sampling) -> None:
    """Raise ``Wrong`` unless ``result`` is the residual of the last sequence."""
    slot = inputs["draft_tokens"].shape[1] // 2
    rows = [
        np.array(inputs[side][-1, slot : slot + 1].astype(mx.float32))
        for side in ("target_logits", "draft_logits")
    ]
    p, q = (_laws(row, sampling)[0] for row in rows)
    residual = np.maximum(p - q, 0)
    error = np.abs(result - residual / residual.sum()).sum()
    if not error < 1e-3:
        raise Wrong(f"{name} has a residual that is {error:.1e} away in total")


# Measurement


def measure(case: Case, make: Callable[..., dict] = make_peers) -> dict[str, Any]:
    """Verify all peers on a case, then time them in turns.

    Args:
        make: of sampling and draft, as ``make_peers``.

    Returns:
        A row of the result, ready for JSON.

    Raises:
        Wrong: a peer disagrees.
    """
    sampling, kind = SETTINGS[case.setting]
    every = make(sampling, kind)
    peers = {name: peer for name, peer in every.items() if isinstance(peer, Peer)}
    inputs = [make_inputs(seed, case) for seed in range(NUM_INPUTS)]
    prepared = {name: [peer.prepare(x) for x in inputs] for name, peer in peers.items()}
    half = case.size[1] // 2
    rounds = {}
    for i, x in enumerate(inputs):
        ours = peers[OURS].run(prepared[OURS][i])
        if np.array(ours[1]).tolist() != [half] * case.size[0]:
            raise Wrong(f"{OURS} does not reject at slot K / 2: {np.array(ours[1]).tolist()}")
        for name, peer in peers.items():
            start = time.perf_counter()
            theirs = peer.run(prepared[name][i])
            fitting = PEER_SECONDS / (time.perf_counter() - start)
            rounds[name] = min(case.rounds, max(LEAST_ROUNDS, round(fitting)))
            if peer.part is not None:
                check_residual(name, theirs[0], x, sampling)
            elif name != OURS:
                check_tokens(name, ours, theirs, x, peer.same_tokens)
    check_laws(make, sampling, kind)

    times: dict[str, list[float]] = {name: [] for name in peers}
    names = list(peers)
    set_cache = _cache_setter(case.cold, inputs)
    at_once = 1 if case.cold else HOT_CALLS
    for turn in range(-(-case.rounds // at_once)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if turn * at_once >= rounds[name]:
                continue
            if not case.cold:
                _warm_up(peers[name].run, prepared[name])
            for call in range(at_once):
                number = (turn * at_once + call) % NUM_INPUTS
                set_cache(number)
                start = time.perf_counter()
                peers[name].run(prepared[name][number])
                times[name].append(time.perf_counter() - start)
    ours_ms = 1e3 * statistics.median(times[OURS])
    return {
        **case._asdict(),
        **work(case),
        "num_accepted": half,
        "peers": {
            name: {
                "rounds": len(t),
                "median_ms": (median := 1e3 * statistics.median(t)),
                "quartiles_ms": [1e3 * q for q in _quartiles(t)],
                "ratio": median / ours_ms,
                "verified": _what_was_verified(peers[name]),
            }
            for name, t in times.items()
        },
        "absent": {name: peer.reason for name, peer in every.items() if isinstance(peer, Absent)},
    }


def _warm_up(run: Callable, inputs: list) -> None:
    start = time.perf_counter()
    for call in range(WARM_UP_CALLS):
        run(inputs[call % NUM_INPUTS])
        if time.perf_counter() - start > WARM_UP_SECONDS:
            break


def _what_was_verified(peer: Peer) -> str:
    if peer.part is not None:
        return peer.part
    return "same tokens" if peer.same_tokens else "same law"


def _quartiles(times: list[float]) -> list[float]:
    return statistics.quantiles(times, n=4)[::2] if len(times) > 1 else 2 * times


def _cache_setter(cold: bool, inputs: list[dict]) -> Callable[[int], Any]:
    """What to call before each timed call, with the number of its input.

    Peers leave other things in the caches than their inputs: these are read again, or evicted.
    """
    if cold:
        buffer = np.ones(EVICTION_BYTES // 8, np.int64)
        return lambda number: buffer.sum()
    arrays = [numpy_arrays(x).values() for x in inputs]
    return lambda number: [array.max() for array in arrays[number]]


# Limits


def limits(threads: int | None) -> dict[str, Any]:
    """What this machine can do at best: exponentials and bytes per second, and an empty call.

    On a GPU the bytes are those of ``mx.max``, and exponentials are not looked at.
    """
    call = Case((1, 4, 64), "temperature")
    inputs = make_inputs(0, call)
    run = make_peers(TEMPERATURE, "dense")[OURS].run
    overhead = min(_timed(run, inputs) for _ in range(200))
    if threads is None:
        x = mx.zeros((EVICTION_BYTES // 4,), mx.float32)
        mx.eval(x)
        seconds = min(_timed(lambda x: mx.eval(mx.max(x)), x) for _ in range(10))
        exp_seconds = None
    else:
        seconds = _read_seconds(threads)
        exp_seconds = _exp_seconds()
    return {
        "threads": threads,
        "exps_per_second": exp_seconds and 1 / exp_seconds,
        "bytes_per_second": EVICTION_BYTES / seconds,
        "call_ms": 1e3 * overhead,
    }


def _exp_seconds() -> float:
    """Of one exponential in a sum, on all threads, with the logits in the first-level cache."""
    count = 1 << 22
    return _ext.exp_sum_seconds(count, 50) / count


def _read_seconds(threads: int) -> float:
    """Of the fastest sum of integers over a buffer that fits no cache."""
    parts = np.array_split(np.ones(EVICTION_BYTES // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return min(_timed(lambda parts: list(pool.map(np.sum, parts)), parts) for _ in range(10))


def _timed(function: Callable, argument: Any) -> float:
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def add_shares(row: dict[str, Any], limit: dict[str, Any]) -> None:
    """Add the time that the limits allow, and what share of the time it is."""
    seconds = [row["bytes"] / limit["bytes_per_second"]] if row["cold"] else []
    if limit["exps_per_second"] is not None:
        seconds.append(row["exps"] / limit["exps_per_second"])
    if limit["threads"] is None:
        seconds = [row["bytes"] / limit["bytes_per_second"]]
    row["limit_ms"] = 1e3 * max(seconds)
    row["share_of_limit"] = row["limit_ms"] / row["peers"][OURS]["median_ms"]


# All of it


def run(cases: list[Case], console: Console) -> dict[str, Any]:
    """Measure limits and cases, with the progress on ``console``.

    Each number of threads has a process of its own, since libraries read it once. The limits are
    measured before and after the cases: the better ones count. Ctrl-C ends it with the rows so far,
    as does a peer that disagrees or a process that dies.

    Returns:
        ``{"limits": [...], "results": [...], "stopped": None or the reason}``, ready for JSON.
    """
    all_limits, rows, stopped = [], [], None
    context = multiprocessing.get_context("spawn")
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("operation", total=len(cases))
            for threads in dict.fromkeys(case.threads for case in cases):
                found: list[dict[str, Any]] = []
                measured: list[dict[str, Any]] = []
                try:
                    with ProcessPoolExecutor(
                        1, context, initializer=_begin, initargs=(threads,)
                    ) as process:
                        found.append(process.submit(limits, threads).result())
                        for case in cases:
                            if case.threads == threads:
                                measured.append(process.submit(measure, case).result())
                                progress.advance(task)
                        found.append(process.submit(limits, threads).result())
                finally:
                    if found:
                        best = _best(found)
                        for row in measured:
                            add_shares(row, best)
                        all_limits.append(best)
                        rows += measured
    except KeyboardInterrupt:
        stopped = INTERRUPTED
        # A second one may have kept the pool from telling its process to end.
        for child in multiprocessing.active_children():
            child.terminate()
    except (Wrong, BrokenProcessPool) as error:
        stopped = str(error)
    return {"limits": all_limits, "results": rows, "stopped": stopped}


def _best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The better one of each limit."""
    best = dict(found[0])
    for name in ("exps_per_second", "bytes_per_second", "call_ms"):
        values = [limit[name] for limit in found if limit[name] is not None]
        if values:
            best[name] = (min if name == "call_ms" else max)(values)
    return best


def use_threads(threads: int | None) -> None:
    """Have this process compute on so many threads, if it has not begun; None changes nothing."""
    if threads is not None:
        os.environ["EXACTSPEC_THREADS"] = str(threads)
        if find_spec("torch") is not None:
            import torch

            torch.set_num_threads(threads)


def _begin(threads: int | None) -> None:
    """Start a process that measures; Linux keeps it on as many cores as threads.

    To wake a thread on another, idle core costs a virtual machine more than a small call.
    """
    if threads is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
    use_threads(threads)

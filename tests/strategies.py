"""Hypothesis strategies: whole inputs, as an operation and as the oracle take them.

Hypothesis chooses what kind of input it is; the numbers come from a seed, so that large
vocabularies stay cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import oracle
from exactspec import Cascade, Sampling, Typical
from exactspec.sampling import ORDERS
from hypothesis import given, settings

VOCAB_SIZES = (1, 2, 3, 5, 8, 31, 32, 33, 100, 257, 2047, 2048, 2049, 4096, 4100)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
LAYOUTS = ("contiguous", "offset", "transposed", "strided", "broadcast")
DRAFT_KINDS = ("dense", "padded", "shorter", "vocab", "sparse", "one_hot")
RULES = ("token", "block", "coupled", "typical", "cascade")

TEMPERATURES = (1.0, 0.5, 2.0, 0.1, 1e-12, 0.0)
TOP_KS = (0, 1, 2, 3, 50, -1, 10**6)
TOP_PS = (1.0, 0.0, 0.1, 0.5, 0.9, 0.999)
MIN_PS = (0.0, 0.05, 0.3, 0.9)
EPSILONS = (0.09, 0.0, 0.45, 0.95)  # no 0.5 or 1, which probabilities often are
DELTAS = (0.3, 0.0, 0.9, 5.0)
ALPHAS = (0.02, -1.0, -0.3, 0.1, 0.45, 0.95)  # no difference of two maxima that are often 1
BAD_TEMPERATURES = (np.nan, np.inf, -1.0)
BAD_FRACTIONS = (np.nan, np.inf, -0.5, 1.5)  # of top_p and min_p
BAD_UNIFORMS = (np.nan, np.inf, -0.25, 1.0)


class Layout(NamedTuple):
    """An array as a view, and the buffer it is a view of."""

    view: mx.array
    buffer: mx.array


class Problem(NamedTuple):
    """Arguments of an operation (``Layout`` in place of arrays) and of the oracle (NumPy)."""

    op: dict[str, Any]
    law: dict[str, Any]
    hand_over: bool = False  # the draft rows' statistics come from ``sample``

    def arguments(self) -> dict[str, Any]:
        return {k: v.view if isinstance(v, Layout) else v for k, v in self.op.items()}

    def buffers(self) -> list[mx.array]:
        return [v.buffer for v in self.op.values() if isinstance(v, Layout)]


def poison(dtype: mx.Dtype) -> float:
    """Large and finite: whoever reads padding gets it wrong, whoever masks NaN does not notice."""
    return {mx.float16: 6e4, mx.float32: 3e38, mx.bfloat16: 3e38}.get(dtype, 2**30)


def lay_out(values: np.ndarray, dtype: mx.Dtype, layout: str) -> Layout:
    """``values [B, ...]`` as a view with the given strides into a buffer filled with poison.

    ``"broadcast"`` wants values that do not differ along the batch.
    """
    values = mx.array(values).astype(dtype)
    if layout == "contiguous" or 0 in values.shape:
        return Layout(values, values)
    if layout == "broadcast":
        buffer = values[:1]
        return Layout(mx.broadcast_to(buffer, values.shape), buffer)
    if layout == "transposed" and values.ndim > 1:
        # The leading axes swapped, and rows further apart than they are long.
        order = (1, 0, *range(2, values.ndim)) if values.ndim > 2 else (0, 1)
        shape = [values.shape[axis] for axis in order]
        buffer = mx.full([*shape[:-1], shape[-1] + 3], poison(dtype), dtype)
        buffer[..., : shape[-1]] = values.transpose(order)
        return Layout(buffer[..., : shape[-1]].transpose(order), buffer)
    if layout == "strided" or values.ndim == 1:
        buffer = mx.full([*values.shape[:-1], 2 * values.shape[-1]], poison(dtype), dtype)
        buffer[..., ::2] = values
        return Layout(buffer[..., ::2], buffer)
    assert layout in ("offset", "transposed")
    buffer = mx.full([n + 3 for n in values.shape], poison(dtype), dtype)
    inner = tuple(slice(2, 2 + n) for n in values.shape)
    buffer[inner] = values
    return Layout(buffer[inner], buffer)


def rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """What ``values`` become in ``dtype``, as float32."""
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


def logits_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of several shapes: smooth, peaked, full of equal values, masked, shifted far from 0."""
    rows = rng.normal(size=shape)
    for row in rows.reshape(-1, shape[-1]):
        row *= rng.choice([0.5, 2.0, 8.0])
        if rng.random() < 0.25:
            row[:] = np.round(row)
        if rng.random() < 0.25:
            row[rng.random(len(row)) < 0.5] = -np.inf
            row[rng.integers(len(row))] = 1.0
        if rng.random() < 0.1:
            row += rng.choice([-1000.0, 1000.0])
    return rows.astype(np.float32)


def spoil(rng: np.random.Generator, rows: np.ndarray) -> None:
    """Make a few rows bad."""
    for row in rows.reshape(-1, rows.shape[-1]):
        if rng.random() < 0.04:
            row[rng.integers(len(row))] = rng.choice([np.nan, np.inf])
        if rng.random() < 0.01:
            row[:] = -np.inf


def random_bitmask(rng: np.random.Generator, shape: tuple[int, ...], vocab_size: int) -> np.ndarray:
    words = rng.integers(0, 2**32, size=(*shape, (vocab_size + 31) // 32), dtype=np.uint64)
    words[rng.random(shape) < 0.5] = 2**32 - 1
    words[..., 0] |= 1
    return words.astype(np.uint32).view(np.int32)


@st.composite
def samplings(draw, rng: np.random.Generator, B: int) -> tuple[Sampling, oracle.Sampling]:
    """Parameters as numbers or arrays, a few array entries bad."""
    values = []
    for choices in (TEMPERATURES, TOP_KS, TOP_PS, MIN_PS):
        if draw(st.booleans()):
            values.append(draw(st.sampled_from(choices)))
            continue
        array = rng.choice(choices, size=B)
        if choices is TEMPERATURES:
            array = np.where(rng.random(B) < 0.03, rng.choice(BAD_TEMPERATURES, size=B), array)
        elif choices is TOP_PS:
            array = np.where(rng.random(B) < 0.5, rng.random(B), array)
            array = np.where(rng.random(B) < 0.03, rng.choice(BAD_FRACTIONS, size=B), array)
        elif choices is MIN_PS:
            array = np.where(rng.random(B) < 0.03, rng.choice(BAD_FRACTIONS, size=B), array)
        values.append(array.astype(np.int32 if choices is TOP_KS else np.float32))
    order = draw(st.sampled_from(ORDERS))
    as_mx = [mx.array(v) if isinstance(v, np.ndarray) else v for v in values]
    return Sampling(*as_mx, order), oracle.Sampling(*values, order)


def random_uniforms(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """In [0, 1), the two ends included."""
    uniforms = (rng.integers(0, 2**24, size=shape) / 2**24).astype(np.float32)
    ends = rng.choice(np.array([0.0, 1 - 2.0**-24], np.float32), size=shape)
    return np.where(rng.random(shape) < 0.1, ends, uniforms)


def keyed_uniforms(keys: np.ndarray, K: int) -> np.ndarray:
    """The uniforms ``[B, K+2]`` that ``keys [B, 2]`` stand for."""
    noise = [np.array(mx.random.uniform(shape=(256,), key=mx.array(key))) for key in keys]
    noise = np.array(noise).reshape(len(keys), 256)
    return np.concatenate([noise[:, :K], noise[:, 254:]], axis=1)


def add_noise(
    draw,
    rng,
    B: int,
    K: int,
    op: dict,
    law: dict,
    layout: str,
    rule: str = "token",
    high_coins: bool = False,
) -> None:
    """Uniforms, or keys for them; keys and positions where noise is a function of those.

    ``high_coins`` make rejections likelier, and are never keys.
    """

    def shared(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values[:1], values.shape) if layout == "broadcast" else values

    keys = shared(rng.integers(0, 2**32, size=(B, 2), dtype=np.uint32))
    if rule == "coupled":
        positions = rng.choice([0, 1, int(rng.integers(10**6)), 2**31 - 1 - K], size=B)
        law["keys"], law["positions"] = keys, shared(positions.astype(np.int32))
        op["keys"] = lay_out(keys, mx.uint32, layout)
        op["positions"] = lay_out(law["positions"], mx.int32, layout)
    elif not high_coins and draw(st.booleans()):
        op["keys"] = lay_out(keys, mx.uint32, layout)
        law["uniforms"] = keyed_uniforms(keys, K)
    else:
        uniforms = random_uniforms(rng, (B, K + 2))
        if high_coins:
            uniforms[:, :K] = np.minimum(uniforms[:, :K] ** 0.1, np.float32(1 - 2.0**-24))
        spoiled = rng.random(B) < 0.02
        uniforms[spoiled, rng.integers(K + 2)] = rng.choice(BAD_UNIFORMS)
        law["uniforms"] = shared(uniforms)
        op["uniforms"] = lay_out(law["uniforms"], mx.float32, layout)


def draft_columns(rng, kind: str, V: int) -> np.ndarray:
    """The id of each column of a dense draft."""
    if kind == "padded":
        return np.arange(V + int(rng.integers(1, 9)))
    if kind == "shorter":
        return np.arange(int(rng.integers(1, V + 1)))
    if kind == "vocab":
        return rng.integers(0, V + 3, size=int(rng.integers(1, min(V, 64) + 3))).astype(np.int32)
    return np.arange(V)


def dense_rows(rng, target: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Draft logits near the target's, so that drafts are sometimes accepted and sometimes not."""
    V = target.shape[-1]
    inside = np.where(columns < V, columns, 0)
    rows = target[..., inside]
    strange = logits_rows(rng, (*rows.shape[:2], len(columns)))
    usable = np.isfinite(rows) | (rows == -np.inf)
    rows = np.where(usable & (columns < V), rows, strange)
    unlike = rng.choice([0.0, 0.5, 3.0], size=(*rows.shape[:2], 1))
    rows = rows + (unlike * rng.normal(size=rows.shape)).astype(np.float32)
    dead = (rows == -np.inf).all(axis=-1, keepdims=True)
    return np.where(dead, strange, rows).astype(np.float32)


def sparse_rows(rng, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Supports ``[B, R, S]`` with padding and repeated ids; likely target tokens come first."""
    B, rows, V = target.shape
    S = int(rng.integers(1, 7))
    likely = np.argsort(-np.nan_to_num(target), axis=-1, kind="stable")
    ids = rng.integers(0, V + 2, size=(B, rows, S))
    ids[..., : min(S, V) // 2] = likely[..., : min(S, V) // 2]
    ids[rng.random(ids.shape) < 0.15] = -1
    probs = rng.dirichlet(np.ones(S), size=(B, rows)).reshape(ids.shape)
    probs = np.where(ids >= 0, probs, 0.0)
    with np.errstate(invalid="ignore"):
        probs = np.nan_to_num(probs / probs.sum(axis=-1, keepdims=True))
    faults = rng.choice([np.nan, np.inf, -0.5, 1.5], size=probs.shape)
    spoiled = rng.random(probs.shape[:-1]) < 0.05
    probs[spoiled, 0] = faults[spoiled, 0]
    return ids.astype(np.int32), probs.astype(np.float32)


def draft_of_row(law: dict, sampling: oracle.Sampling, b: int, row: int) -> oracle.Draft | None:
    """None where the row is bad, or the draft one-hot."""
    if "draft_ids" in law:
        return oracle.sparse_draft(law["draft_ids"][b, row], law["draft_probs"][b, row])
    if "draft_logits" in law and not sampling.of_sequence(b).bad():
        logits = law["draft_logits"][b, row]
        return oracle.dense_draft(logits, law.get("draft_vocab"), sampling.of_sequence(b))
    return None


def draft_token(
    rng, target_logits: np.ndarray, draft: oracle.Draft | None, taken: tuple[int, ...] = ()
) -> int:
    """Drawn from the draft without those taken; sometimes the target's best, any, or unused."""
    chance = rng.random()
    probs = None if draft is None else np.where(np.isin(draft.ids, taken), 0.0, draft.probs)
    if chance < 0.05:
        return int(rng.integers(-2, len(target_logits) + 4))
    if chance < 0.08:
        return -1
    if chance < 0.3 or probs is None or probs.sum() == 0:
        return int(np.nan_to_num(target_logits, nan=-np.inf).argmax())
    return int(rng.choice(draft.ids, p=probs / probs.sum()))


def add_rows(
    draw, rng, put, op: dict, law: dict, shape: tuple, num_drafts: int, kinds: tuple = DRAFT_KINDS
) -> oracle.Sampling:
    """Target rows ``shape``, rows of some kind of draft, and parameters; those of the draft."""
    kind = draw(st.sampled_from(kinds))
    target = logits_rows(rng, shape)
    spoil(rng, target)
    put("target_logits", target, draw(st.sampled_from(DTYPES)))
    target = law["target_logits"][:, :num_drafts]
    op["sampling"], law["sampling"] = draw(samplings(rng, shape[0]))
    draft_sampling = law["sampling"]
    if kind == "sparse":
        ids, probs = sparse_rows(rng, target)
        put("draft_ids", ids, mx.int32)
        put("draft_probs", probs, mx.float32)
    elif kind != "one_hot":
        columns = draft_columns(rng, kind, shape[-1])
        drafts = dense_rows(rng, target, columns)
        spoil(rng, drafts)
        put("draft_logits", drafts, draw(st.sampled_from(DTYPES)))
        if kind == "vocab":
            put("draft_vocab", columns, mx.int32)
        if draw(st.booleans()):
            op["draft_sampling"], law["draft_sampling"] = draw(samplings(rng, shape[0]))
            draft_sampling = law["draft_sampling"]
    return draft_sampling


def putter(op: dict, law: dict, layout: str):
    """``put(name, values, dtype)``: an input laid out for the operation, and for the oracle."""

    def put(name: str, values: np.ndarray, dtype: mx.Dtype) -> None:
        value_layout = layout
        if name == "draft_vocab":  # has no batch axis
            value_layout = "strided" if layout == "strided" else "offset"
        if value_layout == "broadcast":
            values = np.broadcast_to(values[:1], values.shape)
        op[name] = lay_out(values, dtype, value_layout)
        is_logits = name in ("target_logits", "draft_logits")
        law[name] = rounded(values, dtype) if is_logits else values

    return put


def shared_choice(law: dict, b: int, i: int) -> int:
    """What the target chooses at slot ``i`` by shared noise; -1 if its row is bad."""
    at = slice(b, b + 1)
    chosen = oracle.sample(
        law["target_logits"][at, i],
        law["sampling"].of_sequence(b),
        rule="coupled",
        keys=law["keys"][at],
        positions=law["positions"][at] + i,
        token_bitmask=law["token_bitmask"][at, i] if "token_bitmask" in law else None,
    )
    return int(chosen.tokens[0])


def random_rule(draw, rule: str) -> tuple:
    """One of ``RULES`` as the operation and the oracle take it, with drawn parameters."""
    if rule == "typical":
        parameters = draw(st.sampled_from(EPSILONS)), draw(st.sampled_from(DELTAS))
        return Typical(*parameters), oracle.Typical(*parameters)
    if rule == "cascade":
        alpha = draw(st.sampled_from(ALPHAS))
        return Cascade(alpha), oracle.Cascade(alpha)
    return rule, rule


@st.composite
def verify_problems(draw, rule: str) -> Problem:
    """Inputs of ``verify_draft`` for one of ``RULES``."""
    B, K = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    V = draw(st.sampled_from(VOCAB_SIZES))
    layout = draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    op, law = {}, {}
    op["rule"], law["rule"] = random_rule(draw, rule)
    put = putter(op, law, layout)
    kinds = DRAFT_KINDS[:-1] if rule == "cascade" else DRAFT_KINDS
    draft_sampling = add_rows(draw, rng, put, op, law, (B, K + 1, V), K, kinds)
    if draw(st.booleans()):
        lengths = rng.integers(0, K + 1, size=B)
        lengths = np.where(rng.random(B) < 0.1, rng.choice([-1, K + 1], size=B), lengths)
        put("draft_lengths", lengths.astype(np.int32), mx.int32)
    if draw(st.booleans()):
        put("token_bitmask", random_bitmask(rng, (B, K + 1), V), mx.int32)
    add_noise(draw, rng, B, K, op, law, layout, rule)
    tokens = np.zeros((B, K), np.int32)
    for b, i in np.ndindex(tokens.shape):
        draft = draft_of_row(law, draft_sampling, b, i)
        tokens[b, i] = draft_token(rng, law["target_logits"][b, i], draft)
        if rule == "coupled" and rng.random() < 0.8:
            tokens[b, i] = shared_choice(law, b, i)
    put("draft_tokens", tokens, mx.int32)
    op["logprobs"] = law["logprobs"] = draw(st.sampled_from([None, "raw", "filtered"]))
    op["stats"] = law["stats"] = draw(st.booleans())
    return Problem(op, law, hand_over="draft_logits" in op and draw(st.booleans()))


def random_parents(rng, B: int, N: int) -> np.ndarray:
    """Chains, stars and what lies between; a few parents are bad."""
    parents = np.zeros((B, N), np.int32)
    for b in range(B):
        shape = rng.choice(["chain", "star", "star", "narrow", "any"])
        for node in range(N):
            least = {"chain": node - 1, "star": -1, "narrow": max(node - 3, -1), "any": -1}[shape]
            most = {"chain": node - 1, "star": min(node - 1, 0)}.get(shape, node - 1)
            parents[b, node] = rng.integers(least, most + 1)
            if rng.random() < 0.02:
                parents[b, node] = rng.choice([node, node + 1, N + 3, -2])
    return parents


@st.composite
def tree_problems(draw) -> Problem:
    """Inputs of ``verify_tree``."""
    B, N = draw(st.integers(1, 4)), draw(st.integers(0, 8))
    V = draw(st.sampled_from(VOCAB_SIZES))
    layout = draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    op, law = {}, {}
    put = putter(op, law, layout)
    draft_sampling = add_rows(draw, rng, put, op, law, (B, N + 1, V), N + 1)
    op["replacement"] = law["replacement"] = draw(st.booleans())
    put("parents", random_parents(rng, B, N), mx.int32)
    tokens = np.zeros((B, N), np.int32)
    for b, node in np.ndindex(tokens.shape):
        parent = law["parents"][b, node]
        row = parent + 1 if -1 <= parent < node else 0
        siblings = tokens[b, :node][law["parents"][b, :node] == parent]
        taken = () if law["replacement"] else siblings
        draft = draft_of_row(law, draft_sampling, b, row)
        tokens[b, node] = draft_token(rng, law["target_logits"][b, row], draft, taken)
    put("draft_tokens", tokens, mx.int32)
    if draw(st.booleans()):
        put("token_bitmask", random_bitmask(rng, (B, N + 1), V), mx.int32)
    add_noise(draw, rng, B, N, op, law, layout, high_coins=draw(st.booleans()))
    op["logprobs"] = law["logprobs"] = draw(st.sampled_from([None, "raw", "filtered"]))
    return Problem(op, law, hand_over="draft_logits" in op and draw(st.booleans()))


@st.composite
def sample_problems(draw, rule: str) -> Problem:
    """Inputs of ``sample`` for one of its rules."""
    B, V = draw(st.integers(1, 6)), draw(st.sampled_from(VOCAB_SIZES))
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    op, law = {"rule": rule}, {"rule": rule}
    logits = logits_rows(rng, (B, V))
    spoil(rng, logits)
    if layout == "broadcast":
        logits[:] = logits[:1]
    op["logits"], law["logits"] = lay_out(logits, dtype, layout), rounded(logits, dtype)
    op["sampling"], law["sampling"] = draw(samplings(rng, B))
    if draw(st.booleans()):
        bitmask = random_bitmask(rng, (B,), V)
        if layout == "broadcast":
            bitmask[:] = bitmask[:1]
        op["token_bitmask"] = lay_out(bitmask, mx.int32, layout)
        law["token_bitmask"] = bitmask
    add_noise(draw, rng, B, 0, op, law, layout, rule)
    op["logprobs"] = law["logprobs"] = draw(st.sampled_from([None, "raw", "filtered"]))
    return Problem(op, law)


def replay(
    problems: st.SearchStrategy[Problem],
    check: Callable[[Problem], tuple[int, int]],
    num_problems: int = 500,
) -> float:
    """``check`` many problems; the share of ties among the rows, both of which it counts."""
    seen = []

    @settings(max_examples=num_problems, derandomize=True, deadline=None, database=None)
    @given(problems)
    def check_one(problem):
        seen.append(check(problem))

    check_one()
    rows, ties = np.sum(seen, axis=0)
    return ties / rows

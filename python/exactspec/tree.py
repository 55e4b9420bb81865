"""Verification of a tree of drafts."""

from __future__ import annotations

from typing import NamedTuple, Optional

import mlx.core as mx

from . import _ext, ops
from .noise import warn_of_shared_noise
from .ops import Stream
from .sampling import Sampling, check_sampling


class TreeResult(NamedTuple):
    """What :func:`verify_tree` returns. Shapes lose ``B`` when the inputs have no batch axis.

    Attributes:
        tokens: int32 ``[B, N + 1]``: the tokens of the accepted path, then the token drawn after
            it, then ``PLACEHOLDER_TOKEN``.
        path: int32 ``[B, N]``: the accepted nodes, from the context downwards, then -1.
        num_accepted: int32 ``[B]``: length of the path.
        status: uint32 ``[B]``: bits of :class:`exactspec.Status`.
        logprobs: float32 ``[B, N + 1]`` of the emitted tokens, NaN behind them; ``None`` unless
            asked for.
        exact: whether the emitted tokens follow the target's distribution.
    """

    tokens: mx.array
    path: mx.array
    num_accepted: mx.array
    status: mx.array
    logprobs: Optional[mx.array] = None
    exact: bool = True


def verify_tree(
    target_logits: mx.array,
    draft_tokens: mx.array,
    parents: mx.array,
    *,
    draft_logits: Optional[mx.array] = None,
    draft_ids: Optional[mx.array] = None,
    draft_probs: Optional[mx.array] = None,
    draft_vocab: Optional[mx.array] = None,
    draft_stats: Optional[mx.array] = None,
    sampling: Sampling = Sampling(),
    draft_sampling: Optional[Sampling] = None,
    replacement: bool = True,
    uniforms: Optional[mx.array] = None,
    keys: Optional[mx.array] = None,
    token_bitmask: Optional[mx.array] = None,
    logprobs: Optional[str] = None,
    stream: Stream = None,
) -> TreeResult:
    """Accept a path down a tree of drafts and draw the token after it, exactly as the target would.

    From the context downwards, the children of the node reached are tried in the order of their
    index, by recursive rejection (Miao et al. 2305.09781): child ``c`` is accepted iff
    ``u_c * draft(c) < target(c)``, strictly; after a rejection the target becomes the residual
    ``max(target - draft, 0)`` renormalised (if that has no mass, which is rounding, it stays), and
    the next sibling is judged by that. When no child is accepted the next token is drawn from what
    the target has become. A tree that is a chain gives what :func:`exactspec.verify_draft` gives.

    The children of a node must have been drawn from its row of the draft: independently of one
    another (``replacement=True``), or each from what the earlier ones left of it
    (``replacement=False``, Jeon et al. 2402.14160: a rejected token leaves the draft too, which is
    renormalised; where nothing remains of it, the remaining siblings are skipped). Without a draft
    they are one-hot: any tokens, however chosen.

    At temperature 0 the child that is the argmax is followed, the first of them by index; no coin
    and no draft row is read. Rows are read along the accepted path only; everything else about
    inputs, noise and results is as :func:`exactspec.verify_draft` describes it.

    Args:
        target_logits: ``[B, N + 1, V]`` float32, float16 or bfloat16. Row 0 follows the context and
            row ``j + 1`` follows node ``j``.
        draft_tokens: ``[B, N]`` int32 or uint32; ``-1`` marks an unused node, which is never tried.
            Unless the draft is one-hot, whether a node is used may depend on the kept nodes before
            it only, never on the token that was dropped.
        parents: ``[B, N]`` int32: an earlier node, or ``-1`` for the context, which any number of
            nodes may have. Those of unused nodes are ignored.
        draft_logits: ``[B, N + 1, Vd]``: a dense draft. Node ``j`` was drawn from row
            ``parents[j] + 1``; rows of nodes without children are never read.
        draft_ids: ``[B, N + 1, S]`` int32 with ``draft_probs``: a sparse draft, rows likewise.
        draft_probs: ``[B, N + 1, S]`` float32.
        draft_vocab: ``[Vd]`` int32: target id of each column of ``draft_logits``.
        draft_stats: ``[B, N + 1, 4]`` float32: ``row_stats`` of :func:`exactspec.sample` for the
            draft rows.
        sampling: the target's parameters.
        draft_sampling: those of a dense draft (default: the target's).
        replacement: whether siblings were drawn independently. One-hot drafts do not depend on it.
        uniforms: ``[B, N + 2]`` float32 in [0, 1): node ``j``'s coin at ``j``, the draw's pair at
            ``N`` and ``N + 1``. Another value in a row, used or not, sets
            ``Status.BAD_PARAMETER``.
        keys: ``[B, 2]`` uint32: as for :func:`exactspec.verify_draft`, coin ``j`` is node ``j``'s,
            for ``N <= 254``; from ``noise_keys(seeds, positions, "verify")``.
        token_bitmask: ``[B, N + 1, ceil(V / 32)]`` int32, bit 1 = allowed, rows as the target's.
        logprobs: ``None``, ``"raw"`` or ``"filtered"``.
        stream: a CPU stream or device (default: the default one).

    Returns:
        TreeResult: lazily evaluated arrays.

    A parent that is below ``-1`` or does not come before its node sets ``Status.BAD_PARENT``, and
    the tree ends before that node. A child that its row of the draft cannot produce, or whose token
    is below ``-1``, sets ``Status.OUT_OF_RANGE`` and is passed over. A token ``>= V`` that the
    draft can produce sets it too, and is an ordinary proposal of target probability 0.

    Raises:
        TypeError: an argument is not an array (or a parameter not a number).
        ValueError: a wrong rank, shape, dtype, device, choice or combination. The message names the
            argument, what was expected and what came.
    """
    op = "verify_tree"
    ops.check_arrays(
        op,
        target_logits=target_logits,
        draft_tokens=draft_tokens,
        parents=parents,
        draft_logits=draft_logits,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        draft_vocab=draft_vocab,
        draft_stats=draft_stats,
        uniforms=uniforms,
        keys=keys,
        token_bitmask=token_bitmask,
    )
    check_sampling(op, "sampling", sampling)
    draft_sampling = ops.check_draft_sampling(op, draft_logits, draft_sampling, sampling)
    ops.check_choice(op, "logprobs", logprobs, ops.LOGPROBS)
    ops.check_stream(op, stream)
    if not isinstance(replacement, bool):
        raise TypeError(f"[{op}] replacement: expected a bool, got {replacement!r}")
    if keys is not None and draft_tokens.shape[-1:] != (0,):
        warn_of_shared_noise(op, keys)
    keys = ops.resolve_noise(op, "token", target_logits.shape[:-2], uniforms, keys)
    outputs = _ext.verify_tree(
        target_logits,
        draft_tokens,
        parents,
        draft_logits,
        draft_ids,
        draft_probs,
        draft_vocab,
        draft_stats,
        ops.pack(sampling),
        ops.pack(draft_sampling),
        replacement,
        uniforms,
        keys,
        token_bitmask,
        ops.LOGPROBS.index(logprobs),
        stream,
    )
    return TreeResult(*outputs[:4], logprobs=outputs[4] if logprobs else None)

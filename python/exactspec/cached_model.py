"""A language model together with its key-value cache, fed and rolled back token by token."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache

from .caches import Fingerprint, Snapshot, leaves, remember, token_count

# Tokens per forward while the prompt is read: bounds the memory of attention over a long prompt.
PREFILL_CHUNK = 512

# What mlx-lm's models call the part of them that turns tokens into hidden states.
_BACKBONES = ("model", "transformer", "backbone")


class CacheChangedError(RuntimeError):
    """Something else has changed the cache of a text meanwhile."""


class CachedModel:
    """An mlx-lm model, its cache, and the tokens of the text that it has not seen yet.

    The text (prompt, then generated tokens) always equals the tokens in the cache without the
    last ``num_drafts``, followed by ``pending``. Drafts may form a tree: then the cache holds them
    in the order they were fed in, each seeing the text and its own ancestors only.

    Args:
        model: an mlx-lm language model, called as ``model(tokens[1, n], cache=cache)`` and
            returning logits ``[1, n, V]``.
        cache: the caller's cache, as from ``mlx_lm.models.cache.make_prompt_cache``; it is
            updated in place. Default: a new one.
        op: what the caller gave it to, for errors.

    Raises:
        TypeError, ValueError: for a cache that is no list, or has another number of layers than
            the model's own.
    """

    def __init__(self, model: Any, cache: list[Any] | None = None, *, op: str = "CachedModel"):
        self.model = model
        self._op = op
        self._cache_is_callers = cache is not None
        if cache is not None:
            check_layers(op, model, cache)
        self.cache = make_prompt_cache(model) if cache is None else cache
        self.pending: list[int] = []
        self.num_drafts = 0
        self.num_settled = 0  # tokens that became text since the cache was taken over
        self._ancestors: list[list[int]] = []  # of each draft in a tree, itself the last
        self._receive: Callable[[mx.array], None] | None = None
        self._recorder: _Recorder | None = None
        self._hidden: list[mx.array] = []  # of what was fed since ``settle``
        self._num_before = token_count(self.cache)
        # Of a caller's cache, which outlives this text: what takes back a change that was not
        # finished, and what the cache was when it was changed last.
        self._undo: tuple[Any, ...] | None = None
        self._left: Fingerprint | None = None
        # The graph of one token tells the width of the logits; it is never evaluated.
        self.vocab_size: int = model(mx.zeros((1, 1), mx.int32)).shape[-1]

    @property
    def length(self) -> int | None:
        """Tokens of the text; None for a recurrent cache that something else has filled."""
        return None if self._num_before is None else self._num_before + self.num_settled

    def check_trimmable(self, op: str, num_tokens: int) -> None:
        """Raise ``ValueError`` if the cache could not be rolled back within ``num_tokens`` more."""
        # A rotating cache overwrites its oldest tokens once it is full.
        classes = {
            type(leaf).__name__
            for leaf in leaves(self.cache)
            if not leaf.is_trimmable()
            or num_tokens >= getattr(leaf, "max_size", math.inf) - getattr(leaf, "offset", 0)
        }
        if classes:
            raise ValueError(
                f"[{op}] {self._argument}: expected caches that can be rolled back anywhere in the "
                f"next {num_tokens} tokens, got {', '.join(sorted(classes))}; decode without a "
                "drafter (a rotating cache will do until it is full)"
            )

    @property
    def _argument(self) -> str:
        """Where the cache comes from."""
        return "prompt_cache" if self._cache_is_callers else "model"

    def hand_over_hidden_states(self, op: str, receive: Callable[[mx.array], None]) -> mx.array:
        """From now on call ``receive`` with the hidden states of the text, a piece at a time.

        A piece is an array ``[n, d]``, not evaluated: what the model's backbone returned for the
        next n tokens of the text. Those of the prompt come while it is read, then those of each
        forward when ``settle`` tells which of its tokens became text.

        Returns:
            An empty piece ``[0, d]``.

        Raises:
            ValueError: for a model whose backbone is not found.
        """
        try:
            recorded = _recorded(self.model)
        except RecursionError:  # a wrapper that looks its own attributes up in what it wraps
            recorded = None
        if recorded is not None:
            model, recorder = recorded
            model(mx.zeros((1, 1), mx.int32))  # never evaluated
            output = recorder.take()
            if isinstance(output, mx.array) and output.shape[:-1] == (1, 1):
                self.model, self._recorder, self._receive = model, recorder, receive
                return output[0, :0]
        raise ValueError(
            f"[{op}] model: expected one that takes its logits from the output of its "
            f"{', '.join(_BACKBONES[:-1])} or {_BACKBONES[-1]}, to draft from hidden states, got "
            f"{type(self.model).__module__}.{type(self.model).__qualname__}"
        )

    def prefill(self) -> None:
        """Feed all pending tokens but the last, in chunks, and evaluate the cache."""
        while len(self.pending) > 1:
            chunk = self.pending[: min(PREFILL_CHUNK, len(self.pending) - 1)]
            # They are in the cache from here on, also if evaluating it is interrupted.
            self._feed(mx.array(chunk, mx.int32)[None], self.pending[len(chunk) :], 0)
            if self._receive is not None:
                self._receive(_joined(self._hidden))
                self._hidden = []
            mx.eval([c.state for c in self.cache])
            mx.clear_cache()

    def feed(self, drafts: mx.array) -> mx.array:
        """Feed the pending tokens, then ``drafts``, without evaluating anything.

        Args:
            drafts: int32 ``[n]``, tokens proposed after the text; n may be 0.

        Returns:
            Logits of every position fed, ``[len(pending) + n, V]``.
        """
        tokens = mx.concatenate([mx.array(self.pending, mx.int32), drafts.astype(mx.int32)])
        return self._feed(tokens[None], [], drafts.size)[0]

    def check_tree(self, op: str) -> None:
        """Raise ``ValueError`` if the cache cannot hold a tree, or the model not see one."""
        classes = {type(cache).__name__ for cache in self.cache if type(cache) is not KVCache}
        if classes:
            raise ValueError(
                f"[{op}] {self._argument}: expected KVCache in every layer to draft a tree, got "
                f"{', '.join(sorted(classes))}"
            )
        visible = mx.ones((2, 2), mx.bool_)
        layers = [_TreeLayer(KVCache(), mx.zeros((2,), mx.int32), visible) for _ in self.cache]
        try:
            self.model(mx.zeros((2, 1), mx.int32), cache=layers)  # never evaluated
        except Exception as error:
            raise ValueError(
                f"[{op}] model: expected one that takes sequences with masks and positions of "
                f"their own, to draft a tree, got {type(self.model).__module__} ({error})"
            ) from error

    def feed_tree(self, drafts: mx.array, parents: Sequence[int]) -> mx.array:
        """As ``feed``, for drafts that are nodes of a tree, which may come in several pieces.

        The model sees a batch of one-token sequences at positions of their own, which share the
        cached text: no other mask is understood by every model.

        Args:
            drafts: int32 ``[n]``.
            parents: for each of them the number of an earlier draft since ``settle``, or -1 for
                the text.

        Returns:
            Logits of every position fed, ``[len(pending) + n, V]``.
        """
        num_pending, known = len(self.pending), self.num_drafts
        start = self.cache[0].offset - known  # of the pending tokens
        ancestors = self._ancestors[:]
        for index, parent in enumerate(parents):
            before = [] if parent < 0 else ancestors[parent]
            ancestors.append([*before, known + index])
        # What each token sees behind the cached text: pending ones a chain, drafts their ancestors.
        seen = [list(range(i + 1)) for i in range(num_pending)]
        text = list(range(num_pending))
        seen += [text + [num_pending + i for i in line] for line in ancestors[known:]]
        positions = mx.array([start + len(line) - 1 for line in seen], mx.int32)
        end = num_pending + known + len(parents)
        rows = np.zeros((len(seen), start + end), bool)
        rows[:, :start] = True
        for row, line in zip(rows[:, start:], seen):
            row[line] = True
        visible = mx.array(rows)
        layers = [_TreeLayer(cache, positions, visible) for cache in self.cache]
        tokens = mx.concatenate([mx.array(self.pending, mx.int32), drafts.astype(mx.int32)])
        return self._feed(tokens[:, None], [], len(parents), layers, ancestors)[:, 0]

    def settle(
        self, tokens: list[int], num_accepted: int, path: Sequence[int] | None = None
    ) -> None:
        """Append ``tokens`` to the text and roll the other drafts back.

        Args:
            tokens: what became text; the first ``num_accepted`` of them are drafts.
            path: numbers of those drafts, ascending. Default: they are the first drafts.
        """
        if self._is_changed():
            raise CacheChangedError(
                f"[{self._op}] prompt_cache: expected the cache as this text left it, got one that "
                "something else has changed since"
            )
        kept = min(num_accepted, self.num_drafts)
        fed = list(range(kept))
        if path is not None:
            fed = [node for node in path[:num_accepted] if node < self.num_drafts]
            kept = len(fed)
        num_rejected = self.num_drafts - kept
        moved = fed if fed != list(range(kept)) else []
        hidden = _joined(self._hidden) if self._hidden else None
        if hidden is not None and moved:
            start = hidden.shape[0] - self.num_drafts
            hidden[start : start + kept] = hidden[mx.array(moved) + start]
        with self._change(of_layers=bool(moved or num_rejected)):
            if moved:
                for cache in self.cache:
                    _compact(cache, cache.offset - self.num_drafts, moved)
            if num_rejected:
                trim_prompt_cache(self.cache, num_rejected)
            self.pending = self.pending + tokens[kept:]
            self.num_drafts = 0
            self.num_settled += len(tokens)
            self._ancestors = []
            self._hidden = []
        if hidden is not None:
            self._receive(hidden[: hidden.shape[0] - num_rejected])

    def forget(self, num_tokens: int) -> None:
        """Take the last ``num_tokens`` tokens of the text back; there are no drafts."""
        num_pending = min(num_tokens, len(self.pending))
        with self._change():
            self.pending = self.pending[: len(self.pending) - num_pending]
            trim_prompt_cache(self.cache, num_tokens - num_pending)
            self.num_settled -= num_tokens

    def finish(self) -> None:
        """Feed what is pending, so that a cache of the caller's holds the whole text."""
        self._receive = None  # there is no draft to come
        if not self._cache_is_callers or self._is_changed():
            return
        if self.pending:
            self.prefill()
            self.feed(mx.zeros((0,), mx.int32))
            mx.eval([c.state for c in self.cache])
        if self.length is not None:
            remember(self.cache, self.length)

    def leave(self, text: list[int]) -> bool:
        """Finish with ``text`` and no other token, whatever was interrupted before.

        A cache that something else has changed meanwhile is left as it is.

        Args:
            text: the tokens since the cache was taken over.

        Returns:
            Whether a caller's cache holds them; false if it could not be rolled back.
        """
        self._receive = None
        if not self._cache_is_callers:
            return True
        if not self._take_back():
            return False
        if not self._is_changed():
            self._hidden = []
            self.settle(text[self.num_settled :], 0)
            if self.num_settled > len(text):
                self.forget(self.num_settled - len(text))
            self.finish()
        return True

    def _feed(
        self,
        tokens: mx.array,
        pending: list[int],
        num_drafts: int,
        layers: list[Any] | None = None,
        ancestors: list[list[int]] | None = None,
    ) -> mx.array:
        """Call the model; then ``pending`` is left, and there are so many drafts more."""
        # Another model of the same tokenizer may be padded to a wider vocabulary. Its padding ids
        # must not index past this model's embedding; what they are replaced by does not matter,
        # since no text that is kept depends on it.
        tokens = mx.minimum(tokens, self.vocab_size - 1)
        with self._change():
            logits = self.model(tokens, cache=self.cache if layers is None else layers)
            if self._receive is not None:
                # As it is: it is evaluated with the logits, whichever thread goes on from there.
                self._hidden = [*self._hidden, self._recorder.take()]
            self.pending = pending
            self.num_drafts += num_drafts
            if ancestors is not None:
                self._ancestors = ancestors
        return logits

    def _is_changed(self) -> bool:
        """Whether something else has changed a caller's cache."""
        return self._left is not None and not self._left.matches(self.cache)

    @contextmanager
    def _change(self, of_layers: bool = True) -> Iterator[None]:
        """Have a change of a caller's cache happen as a whole or, on an error, not at all.

        The cache of a text that has none of the caller's ends with it.
        """
        if not self._cache_is_callers:
            yield
            return
        left, self._left = self._left, None
        self._undo = (
            Snapshot(self.cache if of_layers else ()),
            (self.pending, self.num_drafts, self.num_settled, self._ancestors, self._hidden),
        )
        try:
            yield
            self._left = Fingerprint(self.cache) if of_layers or left is None else left
            self._undo = None  # from here on it has happened
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> bool:
        """Take back a change that was not finished; whether that was possible.

        It may be interrupted and called again.
        """
        if self._undo is not None:
            snapshot, fields = self._undo
            if not snapshot.restore():
                return False
            self.pending, self.num_drafts, self.num_settled, self._ancestors, self._hidden = fields
            self._left = Fingerprint(self.cache)
            self._undo = None
        return True


def _joined(hidden: list[mx.array]) -> mx.array:
    """What the backbone returned, ``[1, n, d]`` or of a tree ``[n, 1, d]`` each, as ``[n, d]``."""
    return mx.concatenate([piece.reshape(-1, piece.shape[-1]) for piece in hidden])


class _Recorder:
    """Stands in for a part of a model and keeps what it returned last."""

    def __init__(self, part: Any):
        self._part = part
        self._output: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._output = self._part(*args, **options)
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def take(self) -> Any:
        output, self._output = self._output, None
        return output


def _recorded(model: Any) -> tuple[Any, _Recorder] | None:
    """The model with its backbone recorded: a shallow copy, so that the caller's is left alone.

    The model is still called as a whole: many scale or cap their logits behind the projection.
    """
    inner = getattr(model, "language_model", None)
    if inner is not None:
        name, recorded = "language_model", _recorded(inner)
    else:
        name = next((name for name in _BACKBONES if callable(getattr(model, name, None))), None)
        recorded = name and (_Recorder(getattr(model, name)),) * 2
    if not recorded:
        return None
    part, recorder = recorded
    outer = copy.copy(model)
    setattr(outer, name, part)
    return outer, recorder


def check_layers(op: str, model: Any, cache: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a cache that is none of the model's."""
    expected = len(make_prompt_cache(model))
    if not isinstance(cache, (list, tuple)):
        raise TypeError(
            f"[{op}] prompt_cache: expected a list of {expected} layers, got {type(cache).__name__}"
        )
    if len(cache) != expected:
        raise ValueError(
            f"[{op}] prompt_cache: expected {expected} layers, as make_prompt_cache makes them for "
            f"this model, got {len(cache)}"
        )
    for layer in cache:
        if not hasattr(layer, "is_trimmable"):
            raise TypeError(
                f"[{op}] prompt_cache: expected layers as make_prompt_cache makes them, got one of "
                f"type {type(layer).__name__}"
            )


def _compact(cache: KVCache, start: int, kept: list[int]) -> None:
    """Move entries ``start + kept[i]`` to ``start + i``."""
    index = mx.array(kept, mx.int32) + start
    for values in (cache.keys, cache.values):
        values[..., start : start + len(kept), :] = mx.take(values, index, axis=2)


class _TreeLayer:
    """One layer's cache while a model sees nodes as a batch of one-token sequences."""

    def __init__(self, cache: KVCache, positions: mx.array, visible: mx.array):
        self._cache = cache
        self._visible = visible
        self.offset = positions  # what rotary embeddings take as the place of each sequence

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None):
        return self._visible[:, None, None, :]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        nodes = keys.shape[0]
        stored = self._cache.update_and_fetch(*(x.transpose(2, 1, 0, 3) for x in (keys, values)))
        return tuple(mx.broadcast_to(x, (nodes, *x.shape[1:])) for x in stored)

"""A language model together with its key-value cache, fed and rolled back token by token."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache, trim_prompt_cache

# Tokens per forward while the prompt is read: bounds the memory of attention over a long prompt.
PREFILL_CHUNK = 512


class CachedModel:
    """An mlx-lm model, its cache, and the tokens of the text that it has not seen yet.

    The text (prompt, then generated tokens) always equals the tokens in the cache without the
    last ``num_drafts``, followed by ``pending``.

    Args:
        model: an mlx-lm language model, called as ``model(tokens[1, n], cache=cache)`` and
            returning logits ``[1, n, V]``.
        cache: the caller's cache, as from ``mlx_lm.models.cache.make_prompt_cache``; it is
            updated in place. Default: a new one.
    """

    def __init__(self, model: Any, cache: list[Any] | None = None):
        self.model = model
        self.cache = make_prompt_cache(model) if cache is None else cache
        self.pending: list[int] = []
        self.num_drafts = 0
        self._cache_is_callers = cache is not None
        # The graph of one token tells the width of the logits; it is never evaluated.
        self.vocab_size: int = model(mx.zeros((1, 1), mx.int32)).shape[-1]

    def check_trimmable(self, op: str, num_tokens: int) -> None:
        """Raise ``ValueError`` if the cache could not be rolled back within ``num_tokens`` more."""
        classes = {name for cache in self.cache for name in _untrimmable(cache, num_tokens)}
        if classes:
            raise ValueError(
                f"[{op}] prompt_cache: expected caches that can be rolled back anywhere in the "
                f"next {num_tokens} tokens, got {', '.join(sorted(classes))}; decode without a "
                "drafter (a rotating cache will do until it is full)"
            )

    def prefill(self) -> None:
        """Feed all pending tokens but the last, in chunks, and evaluate the cache."""
        while len(self.pending) > 1:
            chunk = self.pending[: min(PREFILL_CHUNK, len(self.pending) - 1)]
            self._forward(mx.array(chunk, mx.int32))
            # They are in the cache from here on, also if evaluating it is interrupted.
            del self.pending[: len(chunk)]
            mx.eval([c.state for c in self.cache])
            mx.clear_cache()

    def feed(self, drafts: mx.array) -> mx.array:
        """Feed the pending tokens, then ``drafts``, without evaluating anything.

        Args:
            drafts: int32 ``[n]``, tokens proposed after the text; n may be 0.

        Returns:
            Logits of every position fed, ``[len(pending) + n, V]``.
        """
        pending = mx.array(self.pending, mx.int32)
        logits = self._forward(mx.concatenate([pending, drafts.astype(mx.int32)]))
        self.pending = []
        self.num_drafts += drafts.size
        return logits

    def settle(self, tokens: list[int], num_accepted: int) -> None:
        """Append ``tokens`` to the text and roll the other drafts back.

        Args:
            tokens: what became text; the first ``num_accepted`` of them are the first drafts.
        """
        kept = min(num_accepted, self.num_drafts)
        if kept < self.num_drafts:
            trim_prompt_cache(self.cache, self.num_drafts - kept)
        self.num_drafts = 0
        self.pending += tokens[kept:]

    def forget(self, num_tokens: int) -> None:
        """Take the last ``num_tokens`` tokens of the text back; there are no drafts."""
        num_pending = min(num_tokens, len(self.pending))
        del self.pending[len(self.pending) - num_pending :]
        trim_prompt_cache(self.cache, num_tokens - num_pending)

    def finish(self) -> None:
        """Feed what is pending, so that a cache of the caller's holds the whole text."""
        if self._cache_is_callers and self.pending:
            self.prefill()
            self.feed(mx.zeros((0,), mx.int32))
            mx.eval([c.state for c in self.cache])

    def _forward(self, tokens: mx.array) -> mx.array:
        # Another model of the same tokenizer may be padded to a wider vocabulary. Its padding ids
        # must not index past this model's embedding; what they are replaced by does not matter,
        # since no text that is kept depends on it.
        tokens = mx.minimum(tokens, self.vocab_size - 1)
        return self.model(tokens[None], cache=self.cache)[0]


def _untrimmable(cache: Any, num_tokens: int) -> list[str]:
    if isinstance(cache, CacheList):
        return [name for inner in cache.caches for name in _untrimmable(inner, num_tokens)]
    # A rotating cache overwrites its oldest tokens once it is full.
    room = getattr(cache, "max_size", math.inf) - getattr(cache, "offset", 0)
    return [] if cache.is_trimmable() and num_tokens < room else [type(cache).__name__]

"""Drafters: what proposes the tokens that the target model then verifies."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx

from .cached_model import CachedModel
from .draft_length import DraftLength
from .models import same_tokenizer
from .ops import sample
from .sampling import Sampling, check_sampling

# A key gives verify_draft this many coins.
MAX_DRAFT_TOKENS = 254


class Draft(NamedTuple):
    """Tokens proposed after the text, and the distributions they were drawn from.

    The fields are the draft's side of ``exactspec.verify_draft``, for one sequence. With neither
    ``draft_logits`` nor ``draft_ids`` each token was certain (a one-hot draft).

    Attributes:
        draft_tokens: int32 ``[K]``. The draft ends at the first -1.
        draft_logits: ``[K, Vd]``, for tokens drawn from dense logits.
        draft_ids: int32 ``[K, S]``, the support of a sparse draft.
        draft_probs: float32 ``[K, S]``, the final probabilities of ``draft_ids``.
        draft_vocab: int32 ``[Vd]``, the target id of each column of ``draft_logits``.
        draft_stats: float32 ``[K, 4]``, the ``row_stats`` of ``exactspec.sample``.
        draft_sampling: how ``draft_logits`` became distributions. Default: as the target's.
        status: uint32 ``[K]``, the ``status`` of ``exactspec.sample``, where it drew the tokens.
    """

    draft_tokens: mx.array
    draft_logits: mx.array | None = None
    draft_ids: mx.array | None = None
    draft_probs: mx.array | None = None
    draft_vocab: mx.array | None = None
    draft_stats: mx.array | None = None
    draft_sampling: Sampling | None = None
    status: mx.array | None = None


def no_draft() -> Draft:
    """A draft of no tokens."""
    # Not a constant: an array that is not evaluated yet belongs to the thread that made it.
    return Draft(mx.zeros((0,), mx.int32))


class Drafter:
    """What the decode loop asks of a drafter. This base class proposes nothing.

    For each text the loop calls ``begin`` once, then in every cycle ``draft`` (if there is room
    for a draft), ``observe`` and ``extend``, and at the end ``finish``, also when the consumer
    stopped early or ``begin`` failed. A drafter serves one text at a time: ``begin`` starts over,
    and the generation of an earlier text, should it go on, raises ``RuntimeError``.

    Any proposal leaves the distribution of the text exact, as long as each token was drawn from
    the distribution handed over with it, with randomness of its own, and the number of tokens
    does not depend on the value of a token that was left out.
    """

    # The most tokens proposed at once.
    num_draft_tokens: int = MAX_DRAFT_TOKENS

    # The statistics of the text that the drafter serves; set and compared by the loop.
    _serves: Any = None

    def begin(
        self, prompt: list[int], *, tokenizer: Any, sampling: Sampling, max_tokens: int
    ) -> None:
        """Start a text.

        Args:
            prompt: ids of the prompt, at least one.
            tokenizer: the target's.
            sampling: the target's.
            max_tokens: the most tokens that will follow the prompt.
        """

    def draft(self, limit: int, key: mx.array) -> Draft:
        """Propose tokens to follow the text, without evaluating an array.

        Args:
            limit: propose at most this many, 1 to 254; more is an error.
            key: uint32 ``[2]``, the only source of randomness to be used.
        """
        return no_draft()

    def observe(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Learn how the cycle went, before its tokens are yielded.

        Args:
            num_drafts: draft tokens verified.
            num_accepted: how many of them were accepted.
            seconds: time of the cycle: drafting, the target's forward and verification.
        """

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        """Append ``tokens`` to the text; the first ``num_accepted`` of them are the first tokens
        of the last draft, and the rest of that draft was rejected."""

    def finish(self) -> None:
        """End the text, as far as ``begin`` got."""


def propose(drafter: Drafter, limit: int, key: mx.array) -> Draft:
    """The drafter's proposal, checked for its length; none where ``limit`` is 0."""
    if limit == 0:
        return no_draft()
    draft = drafter.draft(limit, key)
    if draft.draft_tokens.size > limit:
        raise ValueError(
            f"[stream_generate] drafter: expected at most {limit} draft tokens of "
            f"{type(drafter).__name__}, got {draft.draft_tokens.size}"
        )
    return draft


class PromptLookup(Drafter):
    """Proposes what followed the same words earlier in the text (prompt lookup).

    The last ``max_ngram`` tokens of the text are looked up in the prompt and the generated text,
    then fewer, down to ``min_ngram``; what followed their latest earlier occurrence is proposed.
    Costs no model: worth it wherever the output repeats parts of the input, as in editing code,
    correcting or summarising. See Saxena, "Prompt Lookup Decoding", 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding.

    Args:
        num_draft_tokens: the most tokens proposed at once, 1 to 254.
        max_ngram: longest match tried first, at least ``min_ngram``.
        min_ngram: shortest match that counts, at least 1.

    Raises:
        ValueError: for a number out of range.
    """

    def __init__(self, num_draft_tokens: int = 4, *, max_ngram: int = 3, min_ngram: int = 2):
        _check_integer("PromptLookup", "num_draft_tokens", num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        _check_integer("PromptLookup", "min_ngram", min_ngram, 1)
        _check_integer("PromptLookup", "max_ngram", max_ngram, min_ngram)
        self.num_draft_tokens = num_draft_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def begin(
        self, prompt: list[int], *, tokenizer: Any, sampling: Sampling, max_tokens: int
    ) -> None:
        self._text: list[int] = []
        # N-gram (of any length in use) -> position of the token after its latest occurrence.
        self._followers: dict[tuple[int, ...], int] = {}
        self.extend(prompt, 0)

    def draft(self, limit: int, key: mx.array) -> Draft:
        return Draft(mx.array(self._propose(min(limit, self.num_draft_tokens)), mx.int32))

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        for token in tokens:
            # Only now do the n-grams at the end have a follower; so the lookup of the end of the
            # text never finds itself.
            for ngram in self._last_ngrams():
                self._followers[ngram] = len(self._text)
            self._text.append(token)

    def _last_ngrams(self) -> list[tuple[int, ...]]:
        """The n-grams that end the text, longest first."""
        longest = min(self.max_ngram, len(self._text))
        return [tuple(self._text[-n:]) for n in range(longest, self.min_ngram - 1, -1)]

    def _propose(self, count: int) -> list[int]:
        for ngram in self._last_ngrams():
            start = self._followers.get(ngram)
            if start is not None:
                # The copied stretch may run into the copy itself: a text that repeats goes on.
                copy = self._text[start : start + count]
                return [copy[i % len(copy)] for i in range(count)]
        return []


class DraftModel(Drafter):
    """Proposes tokens drawn from a smaller model of the same tokenizer.

    Each token is drawn by ``exactspec.sample``; the logits and their normalisers go to
    ``exactspec.verify_draft`` as they are. Nothing is evaluated while drafting. The vocabularies
    of both models may be padded differently.

    Args:
        model: an mlx-lm language model.
        tokenizer: its tokenizer, which must be the target's.
        num_draft_tokens: tokens proposed at once, 1 to 254.
        sampling: how drafts are drawn. Default: as the target's, which is best in most cases.
        prompt_cache: a cache of the draft model that goes along with the ``prompt_cache`` given to
            ``stream_generate``: both hold the same text before and after. Default: a new one for
            each text.

    Raises:
        ValueError: for a number out of range; when a text begins, for a target with another
            tokenizer, or a cache that cannot be rolled back.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        num_draft_tokens: int = 4,
        *,
        sampling: Sampling | None = None,
        prompt_cache: list[Any] | None = None,
    ):
        _check_integer("DraftModel", "num_draft_tokens", num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if sampling is not None:
            check_sampling("DraftModel", "sampling", sampling)
        self.model = model
        self.tokenizer = tokenizer
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling
        self.prompt_cache = prompt_cache
        self._model: CachedModel | None = None

    def begin(
        self, prompt: list[int], *, tokenizer: Any, sampling: Sampling, max_tokens: int
    ) -> None:
        self._model = None
        if not same_tokenizer(self.tokenizer, tokenizer):
            raise ValueError(
                "[DraftModel] tokenizer: expected the target's tokenizer, got another one; a draft "
                "model must come from the same family as the target"
            )
        self._sampling = sampling if self.sampling is None else self.sampling
        model = CachedModel(self.model, self.prompt_cache)
        model.check_trimmable("DraftModel", len(prompt) + max_tokens)
        model.settle(prompt, 0)
        try:
            model.prefill()
        except BaseException:
            # The target has not seen the prompt: both caches stay what they were.
            model.forget(len(prompt))
            raise
        self._model = model

    def draft(self, limit: int, key: mx.array) -> Draft:
        count = min(limit, self.num_draft_tokens)
        token = mx.zeros((0,), mx.int32)
        rows, draws = [], []
        for step_key in mx.random.split(key, count):
            rows.append(self._model.feed(token)[-1])
            draws.append(sample(rows[-1], self._sampling, keys=step_key))
            token = draws[-1].tokens[None]
        return Draft(
            draft_tokens=mx.stack([draw.tokens for draw in draws]),
            draft_logits=mx.stack(rows),
            draft_stats=mx.stack([draw.row_stats for draw in draws]),
            draft_sampling=self._sampling,
            status=mx.stack([draw.status for draw in draws]),
        )

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        self._model.settle(tokens, num_accepted)

    def finish(self) -> None:
        if self._model is not None:
            self._model.finish()


class Adaptive(Drafter):
    """Asks a drafter in each cycle for as many tokens as pay, and for none where none do.

    The number that promises the most tokens per second follows from the time that cycles took and
    from how many of their draft tokens were accepted. Other numbers are tried now and then, on
    about 2 % of the time. What was learnt stays from text to text, so keep the object.

    The text is as exact as ever, since a number depends on past cycles only. But it depends on
    their time, so with a temperature above 0 the same seed need not give the same text again.

    Args:
        drafter: whom to ask; its ``num_draft_tokens`` is the most.

    Raises:
        TypeError: ``drafter`` is not a ``Drafter``.
    """

    def __init__(self, drafter: Drafter):
        if not isinstance(drafter, Drafter):
            raise TypeError(
                "[Adaptive] drafter: expected an exactspec.drafters.Drafter, got "
                f"{type(drafter).__name__}"
            )
        self.drafter = drafter
        self.num_draft_tokens = drafter.num_draft_tokens
        self._length = DraftLength(self.num_draft_tokens)

    @property
    def _serves(self) -> Any:
        return self.drafter._serves

    @_serves.setter
    def _serves(self, text: Any) -> None:
        self.drafter._serves = text

    def begin(
        self, prompt: list[int], *, tokenizer: Any, sampling: Sampling, max_tokens: int
    ) -> None:
        self._proposed = 0
        self.drafter.begin(prompt, tokenizer=tokenizer, sampling=sampling, max_tokens=max_tokens)

    def draft(self, limit: int, key: mx.array) -> Draft:
        draft = propose(self.drafter, self._length.choose(limit), key)
        self._proposed = draft.draft_tokens.size
        return draft

    def observe(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        self._length.record(self._proposed, num_drafts, num_accepted, seconds)
        self._proposed = 0  # the next cycle may have no room for a draft
        self.drafter.observe(num_drafts, num_accepted, seconds)

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        self.drafter.extend(tokens, num_accepted)

    def finish(self) -> None:
        self.drafter.finish()


def _check_integer(op: str, argument: str, value: Any, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"[{op}] {argument}: expected an integer, got {type(value).__name__}")
    if not least <= value <= most:
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"[{op}] {argument}: expected {expected}, got {value}")

"""Drafters: what proposes the tokens that the target model then verifies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import trim_prompt_cache

from ._ext import MAX_KEYED_DRAFTS
from .cached_model import CachedModel
from .draft_length import DraftLength
from .heads import Head, check_draft_vocab
from .models import same_tokenizer
from .ngram_index import NgramIndex
from .ops import PLACEHOLDER_TOKEN, sample
from .rules import Cascade, Rule
from .sampling import Sampling, check_sampling, is_greedy

# A key gives verify_draft this many coins.
MAX_DRAFT_TOKENS = MAX_KEYED_DRAFTS

# Entries of a head that may be due while it is not asked: they cost less together.
MOST_ENTRIES_DUE = 16


class Draft(NamedTuple):
    """Tokens proposed after the text, and the distributions they were drawn from.

    The fields are the draft's side of ``exactspec.verify_draft``, for one sequence. With neither
    ``draft_logits`` nor ``draft_ids`` each token was certain (a one-hot draft). With ``parents``
    they are that of ``exactspec.verify_tree``: K nodes, and K + 1 rows.

    Attributes:
        draft_tokens: int32 ``[K]``. The draft ends at the first -1.
        draft_logits: ``[K, Vd]``, for tokens drawn from dense logits.
        draft_ids: int32 ``[K, S]``, the support of a sparse draft.
        draft_probs: float32 ``[K, S]``, the final probabilities of ``draft_ids``.
        draft_vocab: int32 ``[Vd]``, the target id of each column of ``draft_logits``.
        draft_stats: float32 ``[K, 4]``, the ``row_stats`` of ``exactspec.sample``.
        draft_sampling: how ``draft_logits`` became distributions. Default: as the target's.
        parents: of a tree, for each token the number of an earlier one that it follows, or -1 if
            it follows the text.
        status: uint32 ``[K]``, the ``status`` of ``exactspec.sample``, where it drew the tokens.
    """

    draft_tokens: mx.array
    draft_logits: mx.array | None = None
    draft_ids: mx.array | None = None
    draft_probs: mx.array | None = None
    draft_vocab: mx.array | None = None
    draft_stats: mx.array | None = None
    draft_sampling: Sampling | None = None
    parents: Sequence[int] | None = None
    status: mx.array | None = None


def no_draft() -> Draft:
    """A draft of no tokens."""
    # Not a constant: an array that is not evaluated yet belongs to the thread that made it.
    return Draft(mx.zeros((0,), mx.int32))


class Drafter:
    """What the decode loop asks of a drafter. This base class proposes nothing.

    For each text the loop calls ``begin`` once, then in every cycle ``draft`` (if there is room
    for a draft), ``observe`` and ``extend``, and at the end ``finish``, also when the consumer
    stopped early or ``begin`` failed. With ``needs_hidden_states`` it calls ``receive``, too. A
    drafter serves one text at a time: ``begin`` starts over, and the generation of an earlier text,
    should it go on, raises ``RuntimeError``. Several threads at once need a drafter each.

    Any proposal leaves the distribution of the text exact, as long as each token was drawn from
    the distribution handed over with it, with randomness of its own, and the number of tokens
    does not depend on the value of a token that was left out. The children of a tree's node are
    drawn independently of one another, or certain.
    """

    # The most tokens proposed at once.
    num_draft_tokens: int = MAX_DRAFT_TOKENS

    # Whether ``draft`` may return a tree: the target is then checked to take one.
    proposes_trees: bool = False

    # Whether the loop calls ``receive``: the target is then checked to have hidden states.
    needs_hidden_states: bool = False

    # The statistics of the text that the drafter serves; set and compared by the loop.
    _serves: Any = None

    def begin(
        self,
        prompt: list[int],
        *,
        tokenizer: Any,
        sampling: Sampling,
        max_tokens: int,
        rule: Rule,
        position: int,
    ) -> None:
        """Start a text.

        Args:
            prompt: ids of the prompt, at least one.
            tokenizer: the target's.
            sampling: the target's.
            max_tokens: the most tokens that will follow the prompt.
            rule: how drafts will be accepted. Under ``"coupled"`` draw them by
                ``exactspec.sample(..., rule="coupled")``.
            position: of the first token after the prompt, for coupled draws.
        """

    def draft(self, limit: int, key: mx.array) -> Draft:
        """Propose tokens to follow the text, without waiting for an array.

        Args:
            limit: propose at most this many, one after the other, 1 to 254; more is an error.
            key: uint32 ``[2]``, the only source of randomness to be used: another one in every
                cycle, except under ``"coupled"``.
        """
        return no_draft()

    def observe(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Learn how the cycle went, before its tokens are yielded.

        A drafter that asks others calls this for each of them in every cycle, with 0 drafts for
        those that proposed nothing or were not asked; what the cycle yielded then, ``extend`` says.

        Args:
            num_drafts: draft tokens of this drafter that were verified.
            num_accepted: how many of them were accepted.
            seconds: time of the cycle, whoever drafted: drafting, the target's forward and
                verification.
        """

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        """Append ``tokens`` to the text; the first ``num_accepted`` of them are the first tokens
        of the last draft (of a tree: a path from the text), and the rest of it was rejected."""

    def receive(self, hidden: mx.array) -> None:
        """Take the target's hidden states of the next n tokens of the text, from its first on.

        While the prompt is read, they come in chunks of it, up to its last token but one. Then they
        come in every cycle before ``extend``: of the text's last token, and of the accepted ones;
        not in a cycle that is broken off.
        An empty piece comes before ``begin``, so that a wrong d is refused before anything is read.

        Args:
            hidden: ``[n, d]``, not evaluated.
        """

    def finish(self) -> None:
        """End the text, as far as ``begin`` got."""

    def _withdraw(self, prompt: list[int]) -> None:
        """Forget the prompt of a text that does not begin after all."""


def propose(drafter: Drafter, limit: int, key: mx.array) -> Draft:
    """The drafter's proposal, checked for its length; none where ``limit`` is 0."""
    if limit == 0:
        return no_draft()
    draft = drafter.draft(limit, key)
    _check_draft(type(drafter).__name__, draft, drafter.proposes_trees)
    depth = max(depths(draft), default=0)
    if depth > limit:
        raise ValueError(
            f"[stream_generate] drafter: expected at most {limit} draft tokens in a row of "
            f"{type(drafter).__name__}, got {depth}"
        )
    return draft


def _check_draft(name: str, draft: Any, proposes_trees: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what a drafter must not return."""

    def expected(what: str, got: Any) -> str:
        return f"[stream_generate] drafter: expected {what} of {name}, got {got}"

    if not isinstance(draft, Draft):
        raise TypeError(expected("a Draft", type(draft).__name__))
    tokens, parents = draft.draft_tokens, draft.parents
    if parents is not None and not proposes_trees:
        raise ValueError(expected("proposes_trees = True to draft a tree", "False"))
    if not isinstance(tokens, mx.array) or tokens.ndim != 1:
        got = list(tokens.shape) if isinstance(tokens, mx.array) else type(tokens).__name__
        raise TypeError(expected("draft_tokens that are an array [K]", got))
    if tokens.size > MAX_DRAFT_TOKENS:
        raise ValueError(expected(f"at most {MAX_DRAFT_TOKENS} draft tokens", tokens.size))
    if parents is None:
        return
    if isinstance(parents, mx.array) or not all(isinstance(p, int) for p in parents):
        raise TypeError(expected("parents that are a sequence of integers", repr(parents)))
    if len(parents) != tokens.size:
        raise ValueError(expected(f"{tokens.size} parents", len(parents)))
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            what = f"a parent of node {node} that is an earlier node or -1"
            raise ValueError(expected(what, parent))


def depths(draft: Draft) -> list[int]:
    """For each draft token, how many it takes from the text to it, itself included."""
    if draft.parents is None:
        return list(range(1, draft.draft_tokens.size + 1))
    result: list[int] = []
    for parent in draft.parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return result


class PromptLookup(Drafter):
    """Proposes what followed the same words earlier in the text (prompt lookup).

    The last ``max_ngram`` tokens of the text are looked up in the prompt and the generated text,
    then fewer, down to ``min_ngram``; what followed their latest earlier occurrence is proposed.
    Costs no model: worth it wherever the output repeats parts of the input, as in editing code,
    correcting or summarising. By default a token of the text takes at most 40 bytes, and a cycle
    on average as long in a long text as in a short one. See Saxena, "Prompt Lookup Decoding", 2023,
    https://github.com/apoorvumang/prompt-lookup-decoding.

    Args:
        num_draft_tokens: the most tokens proposed one after the other, 1 to 254.
        num_branches: the most continuations proposed at once. With 2 or more, continuations of
            earlier occurrences and shorter matches are proposed too, as a tree of at most 254
            tokens.
        max_ngram: longest match tried first, at least ``min_ngram``.
        min_ngram: shortest match that counts, at least 1.

    Raises:
        ValueError: for a number out of range; when a text begins, for a rule that does not fit.
    """

    def __init__(
        self,
        num_draft_tokens: int = 4,
        *,
        num_branches: int = 1,
        max_ngram: int = 3,
        min_ngram: int = 2,
    ):
        _check_integer("PromptLookup", "num_draft_tokens", num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        most = MAX_DRAFT_TOKENS // num_draft_tokens
        _check_integer("PromptLookup", "num_branches", num_branches, 1, most)
        _check_integer("PromptLookup", "min_ngram", min_ngram, 1)
        _check_integer("PromptLookup", "max_ngram", max_ngram, min_ngram)
        self.num_draft_tokens = num_draft_tokens
        self.num_branches = num_branches
        self.proposes_trees = num_branches > 1
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def begin(
        self,
        prompt: list[int],
        *,
        tokenizer: Any,
        sampling: Sampling,
        max_tokens: int,
        rule: Rule,
        position: int,
    ) -> None:
        _check_rule_fits("PromptLookup", rule, sampling, is_tree=self.proposes_trees)
        lengths = range(self.max_ngram, self.min_ngram - 1, -1)
        self._index = NgramIndex(lengths, self.num_branches)
        self.extend(prompt, 0)

    def draft(self, limit: int, key: mx.array) -> Draft:
        tokens, parents = self._propose(min(limit, self.num_draft_tokens))
        is_chain = parents == list(range(-1, len(parents) - 1))
        return Draft(mx.array(tokens, mx.int32), parents=None if is_chain else parents)

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        for token in tokens:
            self._index.append(token)

    def _continuations(self, count: int) -> Iterator[list[int]]:
        """Of the longest match first, and of each its latest occurrence first."""
        for start in self._index.matches():
            # The copied stretch may run into the copy itself: a text that repeats goes on.
            copy = self._index.text[start : start + count]
            yield [copy[i % len(copy)] for i in range(count)]

    def _propose(self, count: int) -> tuple[list[int], list[int]]:
        """Tokens of a tree and their parents."""
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> number
        branches = 0
        for continuation in self._continuations(count):
            parent, size = -1, len(tokens)
            for token in continuation:
                node = nodes.setdefault((parent, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                parent = node
            branches += len(tokens) > size
            if branches == self.num_branches:
                break
        return tokens, parents


class _ModelDrafter(Drafter):
    """What drafters with a model of their own share: its cache goes along with the text."""

    def __init__(self, model: Any, tokenizer: Any, prompt_cache: list[Any] | None):
        self.model = model
        self.tokenizer = tokenizer
        self.prompt_cache = prompt_cache
        self._model: CachedModel | None = None

    def _begin(
        self, prompt: list[int], tokenizer: Any, max_tokens: int, is_tree: bool = False
    ) -> None:
        self._model = None
        op = type(self).__name__
        if not same_tokenizer(self.tokenizer, tokenizer):
            raise ValueError(
                f"[{op}] tokenizer: expected the target's tokenizer, got another one; a draft "
                "model must come from the same family as the target"
            )
        model = CachedModel(self.model, self.prompt_cache, op=op)
        model.check_trimmable(op, len(prompt) + max_tokens)
        if is_tree:
            model.check_tree(op)
        self._model = model
        try:
            model.settle(prompt, 0)
            model.prefill()
        except BaseException:
            # The target has not seen the prompt: both caches stay what they were.
            model.leave([])
            raise

    def _withdraw(self, prompt: list[int]) -> None:
        self._model.leave([])

    def finish(self) -> None:
        if self._model is not None:
            self._model.finish()


def model_drafters(drafter: Drafter | None) -> list[_ModelDrafter]:
    """Those with a model of their own among a drafter and all that it asks."""
    parts = [] if drafter is None else _parts(drafter)
    # A drafter may know a part by two names.
    return list({id(part): part for part in parts if isinstance(part, _ModelDrafter)}.values())


class DraftModel(_ModelDrafter):
    """Proposes tokens drawn from a smaller model of the same tokenizer.

    Each token is drawn by ``exactspec.sample``; the logits and their normalisers go to
    ``exactspec.verify_draft`` as they are. Drafting waits for nothing. The vocabularies
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
        super().__init__(model, tokenizer, prompt_cache)
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling

    def begin(
        self,
        prompt: list[int],
        *,
        tokenizer: Any,
        sampling: Sampling,
        max_tokens: int,
        rule: Rule,
        position: int,
    ) -> None:
        self._begin(prompt, tokenizer, max_tokens)
        self._sampling = sampling if self.sampling is None else self.sampling
        self._rule = rule
        self._position = position

    def draft(self, limit: int, key: mx.array) -> Draft:
        count = min(limit, self.num_draft_tokens)
        noise = _draw_noise(self._rule, key, self._position, count)
        return _draw(lambda token: self._model.feed(token)[-1], noise, self._sampling)

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        self._position += len(tokens)
        self._model.settle(tokens, num_accepted)


def _draw_noise(rule: Rule, key: mx.array, position: int, count: int) -> list[dict[str, Any]]:
    """For each of ``count`` draws the arguments of ``sample`` that name its noise."""
    if rule != "coupled":
        return [{"keys": step_key} for step_key in mx.random.split(key, count)]
    at = [mx.array(position + i, mx.int32) for i in range(count)]
    return [{"rule": "coupled", "keys": key, "positions": position} for position in at]


def _draw(
    next_row: Callable[[mx.array], mx.array],
    noise: list[dict[str, Any]],
    sampling: Sampling,
    draft_vocab: mx.array | None = None,
) -> Draft:
    """Draw tokens one after the other.

    Args:
        next_row: from the token drawn last, int32 ``[1]`` (at first ``[0]``), to the next row of
            logits.
        noise: of each draw.
        draft_vocab: the ids of the row's columns. Default: the column's number.
    """
    rows, draws, tokens = [], [], []
    token = mx.zeros((0,), mx.int32)
    for step_noise in noise:
        rows.append(next_row(token))
        draws.append(sample(rows[-1], sampling, **step_noise))
        token = draws[-1].tokens[None]
        if draft_vocab is not None:
            # A bad row has no column, and no id.
            token = mx.where(token < 0, PLACEHOLDER_TOKEN, draft_vocab[token])
        tokens.append(token)
        # The device draws this token while the graph of the next one is built.
        mx.async_eval(token)
    return Draft(
        draft_tokens=mx.concatenate(tokens),
        draft_logits=mx.stack(rows),
        draft_vocab=draft_vocab,
        draft_stats=mx.stack([draw.row_stats for draw in draws]),
        draft_sampling=sampling,
        status=mx.stack([draw.status for draw in draws]),
    )


class DraftTree(_ModelDrafter):
    """Proposes a tree: the likeliest continuations under a smaller model of the same tokenizer.

    Each of a node's children is certain to be proposed, so it is verified as a one-hot draft by
    ``exactspec.verify_tree``: at any temperature a node's children are accepted with their joint
    probability under the target. Drafting waits for nothing.

    Args:
        model: an mlx-lm language model whose cache is a plain ``KVCache`` in every layer.
        tokenizer: its tokenizer, which must be the target's.
        widths: children of the text, of each of those, and so on: ``(3, 2, 1)`` proposes three
            tokens, two after each of them and one after each of those. At most 254 in total.
        prompt_cache: as for ``DraftModel``.

    Raises:
        TypeError, ValueError: for widths out of range; when a text begins, for a target with
            another tokenizer, or a rule other than ``"token"``.
    """

    proposes_trees = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        widths: Sequence[int] = (3, 2, 1),
        *,
        prompt_cache: list[Any] | None = None,
    ):
        if not isinstance(widths, Sequence) or isinstance(widths, str):
            raise TypeError(
                f"[DraftTree] widths: expected a sequence of integers, got {type(widths).__name__}"
            )
        widths = tuple(widths)
        for width in widths:
            _check_integer("DraftTree", "widths", width, 1)
        total = sum(math.prod(widths[: i + 1]) for i in range(len(widths)))
        if not 1 <= total <= MAX_DRAFT_TOKENS:
            raise ValueError(
                f"[DraftTree] widths: expected a tree of 1 to {MAX_DRAFT_TOKENS} tokens, got "
                f"{total} with {widths}"
            )
        super().__init__(model, tokenizer, prompt_cache)
        self.widths = widths
        self.num_draft_tokens = len(widths)

    def begin(
        self,
        prompt: list[int],
        *,
        tokenizer: Any,
        sampling: Sampling,
        max_tokens: int,
        rule: Rule,
        position: int,
    ) -> None:
        _check_rule_fits("DraftTree", rule, sampling, is_tree=True)
        self._begin(prompt, tokenizer, max_tokens, is_tree=True)

    def draft(self, limit: int, key: mx.array) -> Draft:
        widths = self.widths[:limit]
        levels: list[mx.array] = []
        parents: list[int] = []
        row = self._model.feed(mx.zeros((0,), mx.int32))[-1:]
        for depth, width in enumerate(widths):
            children = _likeliest(row, width)
            levels.append(mx.flatten(children))
            mx.async_eval(levels[-1])  # while the graph of the next level is built
            first = len(parents) - row.shape[0] if depth else -1  # of the nodes that get children
            new = [first + i // children.shape[1] for i in range(children.size)]
            parents += new
            if depth + 1 < len(widths):
                row = self._model.feed_tree(levels[-1], new)
        self._draft = Draft(mx.concatenate(levels), parents=parents)
        return self._draft

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        # The draft's tokens are known by now.
        nodes = zip(self._draft.parents, self._draft.draft_tokens.tolist()) if num_accepted else ()
        number = {node: i for i, node in enumerate(nodes)}
        path = [-1]
        for token in tokens[:num_accepted]:
            path.append(number[path[-1], token])
        self._model.settle(tokens, num_accepted, path[1:])


def _likeliest(rows: mx.array, count: int) -> mx.array:
    """Ids ``[n, min(count, V)]`` of the largest values of rows ``[n, V]``, in descending order."""
    count = min(count, rows.shape[1])
    ids = mx.argpartition(-rows, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(rows, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)


def _check_rule_fits(op: str, rule: Rule, sampling: Sampling, is_tree: bool) -> None:
    """Raise ``ValueError`` for a rule that cannot judge certain (one-hot) drafts, or a tree.

    At temperature 0 every rule judges by the target alone.
    """
    if is_tree and rule != "token":
        raise ValueError(f"[{op}] rule: expected 'token' for a tree of drafts, got {rule!r}")
    if isinstance(rule, Cascade) and not is_greedy(sampling.temperature):
        raise ValueError(
            f"[{op}] rule: expected one that does not read the draft's distribution (these drafts "
            f"have none; DraftModel's do), got {rule!r}"
        )


class MTPDrafter(Drafter):
    """Proposes tokens drawn by a light head from the target's own hidden states.

    An entry of the head takes the hidden state of a token and the id of the next one, and predicts
    the token after that; for the following draft its output stands in for the hidden state that
    the target has not computed yet (multi-token prediction as in DeepSeek-V3, arXiv:2412.19437,
    section 2.2; EAGLE, arXiv:2401.15077). When the target has judged the drafts, their entries are
    made again from its own hidden states. Drafting waits for nothing.

    If ``stream_generate`` continues a ``prompt_cache``, the head sees the text from the new prompt
    on. Nothing is drafted after a prompt of one token, which has no hidden state yet.

    Args:
        head: such as ``exactspec.heads.load_default_head`` returns, made for the target.
        num_draft_tokens: tokens proposed at once, 1 to 254.
        sampling: how drafts are drawn. Default: as the target's, which is best in most cases.

    Raises:
        TypeError: ``head`` lacks something of a ``Head``.
        ValueError: for a number or a ``draft_vocab`` out of range; before a text begins, for a
            target with hidden states of another size.
    """

    needs_hidden_states = True

    def __init__(self, head: Head, num_draft_tokens: int = 1, *, sampling: Sampling | None = None):
        _check_integer("MTPDrafter", "num_draft_tokens", num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if sampling is not None:
            check_sampling("MTPDrafter", "sampling", sampling)
        # Not isinstance: from Python 3.12 on it does not see the arrays of an nn.Module.
        names = ("hidden_size", "draft_vocab", "make_cache", "logits")
        if not (callable(head) and all(hasattr(head, name) for name in names)):
            raise TypeError(
                "[MTPDrafter] head: expected what exactspec.heads.Head asks for, got "
                f"{type(head).__name__}"
            )
        self.head = head
        self.num_draft_tokens = num_draft_tokens
        self.sampling = sampling
        self._head_ids = None
        if head.draft_vocab is not None:
            try:
                check_draft_vocab(head.draft_vocab)
            except ValueError as error:
                raise ValueError(f"[MTPDrafter] head: {error}") from None
            self._head_ids = np.array(head.draft_vocab)

    def begin(
        self,
        prompt: list[int],
        *,
        tokenizer: Any,
        sampling: Sampling,
        max_tokens: int,
        rule: Rule,
        position: int,
    ) -> None:
        self._sampling = sampling if self.sampling is None else self.sampling
        self._rule = rule
        self._position = position
        self._text = list(prompt)
        self._cache = self.head.make_cache()
        # Entry i is made of the text's hidden state i and token i + 1. Those of the text come
        # first in the cache, those of drafts behind them.
        self._num_entries = self._num_drafted = 0
        self._due: list[mx.array] = []  # hidden states whose entries are not made yet
        self._vocab = None if self._head_ids is None else _DraftVocab(self._head_ids, prompt)

    def receive(self, hidden: mx.array) -> None:
        if hidden.shape[-1] != self.head.hidden_size:
            raise ValueError(
                f"[MTPDrafter] head: expected one made for the target, whose hidden states are of "
                f"size {hidden.shape[-1]}, got {type(self.head).__name__} for "
                f"{self.head.hidden_size}"
            )
        if hidden.shape[0] == 0:
            return
        self._due.append(hidden)
        if self._num_entries + self._num_due < len(self._text):  # the prompt is being read
            mx.eval(self._make_entries())

    def draft(self, limit: int, key: mx.array) -> Draft:
        if not self._due:
            return no_draft()
        output = self._enter(self._num_due)
        count = min(limit, self.num_draft_tokens)
        vocab = None if self._vocab is None else self._vocab.refreshed()

        def next_row(token: mx.array) -> mx.array:
            nonlocal output
            if token.size:
                output = self._outputs(token, output)
                self._num_drafted += 1
            row = self._row(output)
            if vocab is None:
                return row
            if vocab.added is not None:
                row = mx.concatenate([row, self._row(output, vocab.added)])
            # Noise that is shared names ids, not columns.
            return vocab.spread(row) if self._rule == "coupled" else row[vocab.order]

        noise = _draw_noise(self._rule, key, self._position, count)
        ids = None if vocab is None or self._rule == "coupled" else vocab.ids
        return _draw(next_row, noise, self._sampling, ids)

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        trim_prompt_cache(self._cache, self._num_drafted)
        self._num_drafted = 0
        self._position += len(tokens)
        self._text += tokens
        if self._vocab is not None:
            self._vocab.add(tokens)
        if self._num_due > MOST_ENTRIES_DUE:
            mx.async_eval(self._make_entries())

    def finish(self) -> None:
        self._due = []

    @property
    def _num_due(self) -> int:
        return sum(hidden.shape[0] for hidden in self._due)

    def _make_entries(self) -> list[Any]:
        """Make the entries that are due but for the last, whose output the next draft needs.

        Returns the cache's arrays, if any was made, to be evaluated.
        """
        count = min(self._num_due, len(self._text) - 1 - self._num_entries) - 1
        if count < 1:
            return []
        self._enter(count)
        return [layer.state for layer in self._cache]

    def _enter(self, count: int) -> mx.array:
        """Make the next ``count`` entries; the output ``[1, d]`` of the last one."""
        hidden = mx.concatenate(self._due)
        self._due = [hidden[count:]] if count < hidden.shape[0] else []
        first = self._num_entries + 1
        tokens = mx.array(self._text[first : first + count], mx.int32)
        self._num_entries += count
        return self._outputs(tokens, hidden[:count])[-1:]

    def _outputs(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        outputs = self.head(tokens, hidden, self._cache)
        return self._checked("outputs", outputs, [tokens.size, self.head.hidden_size])

    def _row(self, output: mx.array, ids: mx.array | None = None) -> mx.array:
        rows = self.head.logits(output, ids)
        width = None if self._head_ids is None else self._head_ids.size
        return self._checked("logits", rows, [1, width if ids is None else ids.size])[0]

    def _checked(self, what: str, got: Any, shape: list[int | None]) -> mx.array:
        """A column too few or too many would give ids the probabilities of others."""
        is_array = isinstance(got, mx.array)
        if not is_array or list(got.shape) != [n or got.shape[-1] for n in shape]:
            raise ValueError(
                f"[MTPDrafter] head: expected {what} of shape {shape} of "
                f"{type(self.head).__name__}, got {list(got.shape) if is_array else repr(got)}"
            )
        return got


class _DraftVocab:
    """The ids of a draft: a head's own and, behind them, the others that occur in the text."""

    def __init__(self, head_ids: np.ndarray, text: list[int]):
        self._head_ids = head_ids
        self._known = set(head_ids.tolist())
        self._added: list[int] = []
        self._is_stale = True
        self.add(text)

    def add(self, tokens: list[int]) -> None:
        new = set(tokens) - self._known
        if new:
            self._known |= new
            self._added += sorted(new)
            self._is_stale = True

    def refreshed(self) -> _DraftVocab:
        """Itself, with ``added`` (ids, or None), ``order`` (of columns by id) and ``ids`` in that
        order up to date."""
        if self._is_stale:
            self._is_stale = False
            self._unordered = np.concatenate([self._head_ids, np.array(self._added, np.int32)])
            order = np.argsort(self._unordered, kind="stable")
            self.added = mx.array(self._added, mx.int32) if self._added else None
            self.order = mx.array(order.astype(np.int32))
            self.ids = mx.array(self._unordered[order])
        return self

    def spread(self, row: mx.array) -> mx.array:
        """The row with a column for every id, -inf where there is none in the vocabulary."""
        full = mx.full((int(self._unordered.max()) + 1,), -mx.inf, row.dtype)
        full[self.ids] = row[self.order]
        return full


class Hybrid(Drafter):
    """Asks one drafter and, where that has nothing to propose, another one.

    Prompt lookup in front of a draft head copies what the text repeats and leaves the rest to the
    head, as in SuffixDecoding (Oliaro et al., arXiv:2411.04975). A longer ``min_ngram`` has it
    propose less often, and be right more often.

    Args:
        first: asked in every cycle, such as ``PromptLookup(min_ngram=3)``.
        second: asked where the first proposes no token.

    Raises:
        TypeError: for what is not a ``Drafter``.
        ValueError: for a drafter that is both, or part of both.
    """

    def __init__(self, first: Drafter, second: Drafter):
        _check_drafter("Hybrid", "first", first)
        _check_drafter("Hybrid", "second", second)
        if not set(map(id, _parts(first))).isdisjoint(map(id, _parts(second))):
            raise ValueError(
                "[Hybrid] second: expected a drafter that is no part of first, got "
                f"{type(second).__name__}"
            )
        self.first = first
        self.second = second
        self.num_draft_tokens = max(first.num_draft_tokens, second.num_draft_tokens)
        self.proposes_trees = first.proposes_trees or second.proposes_trees
        self.needs_hidden_states = first.needs_hidden_states or second.needs_hidden_states

    @property
    def _serves(self) -> Any:
        return self.first._serves if self.first._serves is self.second._serves else None

    @_serves.setter
    def _serves(self, text: Any) -> None:
        self.first._serves = self.second._serves = text

    def begin(self, prompt: list[int], **options: Any) -> None:
        self._proposer: Drafter | None = None
        self.first.begin(prompt, **options)
        try:
            self.second.begin(prompt, **options)
        except BaseException:
            for drafter in _parts(self.first):
                drafter._withdraw(prompt)
            raise

    def draft(self, limit: int, key: mx.array) -> Draft:
        for drafter in (self.first, self.second):
            draft = propose(drafter, limit, key)
            if draft.draft_tokens.size:
                self._proposer = drafter
                break
        return draft

    def receive(self, hidden: mx.array) -> None:
        for drafter in (self.first, self.second):
            if drafter.needs_hidden_states:
                drafter.receive(hidden)

    def observe(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        for drafter in (self.first, self.second):
            own = (num_drafts, num_accepted) if drafter is self._proposer else (0, 0)
            drafter.observe(*own, seconds)

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        for drafter in (self.first, self.second):
            drafter.extend(tokens, num_accepted if drafter is self._proposer else 0)
        self._proposer = None

    def finish(self) -> None:
        try:
            self.first.finish()
        finally:
            self.second.finish()


class Adaptive(Drafter):
    """Asks a drafter in each cycle for as many tokens as pay, and for none where none do.

    The number that promises the most tokens per second follows from the time that cycles took and
    from how many of their draft tokens were accepted. Other numbers are tried now and then, on
    about 2 % of the time. In front of another drafter, as in ``Hybrid(Adaptive(x), y)``, no draft
    pays that gives fewer tokens per second than the other one's. What was learnt stays from text to
    text, so keep the object.

    The text is as exact as ever, since a number depends on past cycles only. But it depends on
    their time, so with a temperature above 0 the same seed need not give the same text again,
    except under the rule ``"coupled"``.

    Args:
        drafter: whom to ask; its ``num_draft_tokens`` is the most.

    Raises:
        TypeError: ``drafter`` is not a ``Drafter``.
    """

    def __init__(self, drafter: Drafter):
        _check_drafter("Adaptive", "drafter", drafter)
        self.drafter = drafter
        self.num_draft_tokens = min(drafter.num_draft_tokens, MAX_DRAFT_TOKENS)
        self._length = DraftLength(self.num_draft_tokens)

    @property
    def proposes_trees(self) -> bool:
        return self.drafter.proposes_trees

    @property
    def needs_hidden_states(self) -> bool:
        return self.drafter.needs_hidden_states

    @property
    def _serves(self) -> Any:
        return self.drafter._serves

    @_serves.setter
    def _serves(self, text: Any) -> None:
        self.drafter._serves = text

    def begin(self, prompt: list[int], **options: Any) -> None:
        # Draft tokens proposed in this cycle; None where it was not asked for any.
        self._proposed: int | None = None
        self.drafter.begin(prompt, **options)

    def draft(self, limit: int, key: mx.array) -> Draft:
        draft = propose(self.drafter, self._length.choose(limit), key)
        self._proposed = max(depths(draft), default=0)
        return draft

    def receive(self, hidden: mx.array) -> None:
        self.drafter.receive(hidden)

    def observe(self, num_drafts: int, num_accepted: int, seconds: float) -> None:
        if self._proposed is None:
            self._length.wait(seconds)
        else:
            self._length.record(self._proposed, num_drafts, num_accepted, seconds)
        self.drafter.observe(num_drafts, num_accepted, seconds)

    def extend(self, tokens: list[int], num_accepted: int) -> None:
        if self._proposed == 0 and tokens:
            self._length.record_gain(len(tokens) - 1)
        self._proposed = None
        self.drafter.extend(tokens, num_accepted)

    def finish(self) -> None:
        self.drafter.finish()


def _parts(drafter: Drafter) -> list[Drafter]:
    """A drafter and all that it asks."""
    inner = [part for part in vars(drafter).values() if isinstance(part, Drafter)]
    return [drafter, *(part for drafter in inner for part in _parts(drafter))]


def _check_drafter(op: str, argument: str, drafter: Any) -> None:
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"[{op}] {argument}: expected an exactspec.drafters.Drafter, got "
            f"{type(drafter).__name__}"
        )


def _check_integer(op: str, argument: str, value: Any, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"[{op}] {argument}: expected an integer, got {type(value).__name__}")
    if not least <= value <= most:
        expected = f"at least {least}" if most == math.inf else f"{least} to {most}"
        raise ValueError(f"[{op}] {argument}: expected {expected}, got {value}")

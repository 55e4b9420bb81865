"""The decode loop: streams text from an mlx-lm model, with or without a drafter."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ._ext import LEAST_TEMPERATURE
from .cached_model import CacheChangedError, CachedModel, check_layers
from .caches import Holder, Superseded
from .detokenizer import Detokenizer
from .drafters import MAX_DRAFT_TOKENS, Draft, Drafter, depths, model_drafters, propose
from .noise import noise_keys
from .ops import PLACEHOLDER_TOKEN, Status, verify_draft
from .rules import EXACT_RULES, Rule, Typical, check_rule, is_exact
from .sampling import Sampling, check_sampling, describe_number
from .tree import verify_tree

# The device's buffers that are not in use are given back every so many tokens: they come in ever
# new sizes as the text grows. mlx-lm does so as often.
CLEAR_EVERY = 256


class NonFiniteLogitsError(ArithmeticError):
    """A model returned NaN, +inf, or no finite logit, where the next token depended on it.

    Attributes:
        sequence: index of the sequence, 0 in the decode loop.
        slot: number of draft tokens that were accepted before the bad row in its cycle.
        side: ``"target"`` or ``"draft"``, the model whose logits were bad.
        partial: from ``generate``, the ``Generation`` up to the error; else None.
    """

    def __init__(self, sequence: int, slot: int, side: str):
        super().__init__(sequence, slot, side)  # what copying and pickling pass here again
        self.sequence = sequence
        self.slot = slot
        self.side = side
        self.partial: Generation | None = None

    def __str__(self) -> str:
        return (
            f"[stream_generate] {self.side} logits: expected finite values or -inf, got NaN, +inf "
            f"or no finite value in sequence {self.sequence}, slot {self.slot}"
        )


@dataclass
class Statistics:
    """What a generation did so far. Times are in seconds and leave out the consumer's own.

    A cycle is one draft, one forward of the target over it, and one verification. The slot of a
    draft token is its place after the text; several tokens of a tree share one.

    Attributes:
        prompt_tokens: tokens of the prompt.
        prompt_time: for all of them but the last, which is part of the first cycle.
        generated_tokens: tokens yielded.
        generation_time: in cycles.
        exact: whether the text is a sample of the target: false once a lossy rule has judged a
            draft at a temperature above 0.
        cycles: number of cycles.
        slot_drafted: ``slot_drafted[i]`` cycles had a draft token in slot i.
        slot_reached: in ``slot_reached[i]`` cycles the token of slot i was judged, since all
            tokens before it were accepted and none of them ended the text.
        slot_accepted: in ``slot_accepted[i]`` cycles the token of slot i was accepted, and so
            all tokens before it.
        draft_time, target_time, verify_time: parts of generation_time; only with
            ``profile=True``, else None.
    """

    prompt_tokens: int = 0
    prompt_time: float = 0.0
    generated_tokens: int = 0
    generation_time: float = 0.0
    cycles: int = 0
    slot_drafted: list[int] = field(default_factory=list)
    slot_reached: list[int] = field(default_factory=list)
    slot_accepted: list[int] = field(default_factory=list)
    exact: bool = True
    draft_time: float | None = None
    target_time: float | None = None
    verify_time: float | None = None

    @property
    def drafted(self) -> int:
        """Draft tokens proposed."""
        return sum(self.slot_drafted)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.slot_accepted)

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted; 0 without any."""
        return _ratio(self.accepted, self.drafted)

    @property
    def slot_acceptance_rates(self) -> list[float]:
        """For each slot, accepted over drafted; never increasing if all drafts are as long."""
        return [_ratio(a, d) for a, d in zip(self.slot_accepted, self.slot_drafted)]

    @property
    def mean_accepted_length(self) -> float:
        """Draft tokens accepted per cycle."""
        return _ratio(self.accepted, self.cycles)

    @property
    def tokens_per_cycle(self) -> float:
        """Tokens yielded per cycle, that is, per forward of the target."""
        return _ratio(self.generated_tokens, self.cycles)

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of reading the prompt; 0 for a prompt of one token."""
        return _ratio(self.prompt_tokens - 1, self.prompt_time)

    @property
    def tokens_per_second(self) -> float:
        """Speed of generation."""
        return _ratio(self.generated_tokens, self.generation_time)

    def _count_cycle(self, num_drafts: int, sources: list[str], seconds: float) -> None:
        self.cycles += 1
        self.generation_time += seconds
        new_slots = [0] * (num_drafts - len(self.slot_drafted))
        self.slot_drafted += new_slots
        self.slot_reached += new_slots
        self.slot_accepted += new_slots
        for slot in range(num_drafts):
            self.slot_drafted[slot] += 1
        for slot, source in enumerate(sources):
            if source != "bonus":  # a residual token stands where a draft was rejected
                self.slot_reached[slot] += 1
                self.slot_accepted[slot] += source == "draft"


class GeneratedToken(NamedTuple):
    """One token, as ``stream_generate`` yields it.

    Attributes:
        text: the text that became certain with this token; may be empty, since a character can
            take several tokens. A stop token has no text of its own. All of them joined are what
            the tokenizer's ``decode``, without tidying spaces up, adds to the prompt's text for
            the new tokens; bytes that are no UTF-8 are U+FFFD.
        token: its id.
        source: ``"draft"``: an accepted draft token; ``"residual"``: drawn where a draft token was
            rejected; ``"bonus"``: drawn after a draft that was accepted whole, or without any.
        logprob: its log-probability under the target in nats, if asked for, else None.
        finish_reason: on the last token ``"stop"`` (a stop token) or ``"length"``
            (``max_tokens`` reached), else None.
        statistics: of the whole generation so far; one object, updated in place.
    """

    text: str
    token: int
    source: str
    logprob: float | None
    finish_reason: str | None
    statistics: Statistics


class Generation(NamedTuple):
    """A finished generation: the fields of its ``GeneratedToken`` items, joined.

    Attributes:
        text: the text, without a stop token.
        tokens: ids, with the stop token.
        sources: for each token ``"draft"``, ``"residual"`` or ``"bonus"``.
        logprobs: for each token, if asked for, else None.
        finish_reason: ``"stop"`` or ``"length"``; None if it was cut short by an error.
        statistics: of the whole generation.
    """

    text: str
    tokens: list[int]
    sources: list[str]
    logprobs: list[float] | None
    finish_reason: str | None
    statistics: Statistics

    @classmethod
    def join(cls, items: list[GeneratedToken]) -> Generation:
        """Join what ``stream_generate`` yielded, at least one token."""
        logprobs = [item.logprob for item in items]
        return cls(
            text="".join(item.text for item in items),
            tokens=[item.token for item in items],
            sources=[item.source for item in items],
            logprobs=None if None in logprobs else logprobs,
            finish_reason=items[-1].finish_reason,
            statistics=items[-1].statistics,
        )


def stream_generate(
    model: Any,
    tokenizer: Any,
    prompt: str | list[int] | mx.array,
    *,
    drafter: Drafter | None = None,
    sampling: Sampling = Sampling(),
    rule: Rule = "token",
    max_tokens: int = 256,
    stop_tokens: Collection[int] | None = None,
    seed: int | None = None,
    logprobs: str | None = None,
    prompt_cache: list[Any] | None = None,
    profile: bool = False,
) -> Iterator[GeneratedToken]:
    """Generate text token by token.

    Nothing is done, and no argument is looked at, before the first token is asked for.

    The text has exactly the distribution that ``sampling`` gives the model, whatever the drafter
    proposes: speculative sampling (Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al.,
    arXiv:2302.01318, algorithm 2). At temperature 0 it is the text of plain greedy decoding,
    except where two logits are so close that a forward over several tokens, which rounds
    differently than one over a single token, puts them in another order. Under the rule
    ``"coupled"`` the same holds at every temperature: with the same seed the text is that of plain
    decoding under ``"coupled"``, whatever the drafter.

    Each cycle waits for the device once: drafting, the target's forward and verification follow
    each other without a value in between. While a draft model works, the graphs of its next step
    and of the target's forward are built.

    Args:
        model: an mlx-lm language model.
        tokenizer: its tokenizer, as from ``mlx_lm.load``, or a Hugging Face tokenizer.
        prompt: text, or token ids (integers, or an array ``[n]`` of them), at least one token. Text
            gets the tokenizer's special tokens, such as one that begins a text, unless it begins
            with that token itself or continues a ``prompt_cache`` that holds some text.
        drafter: proposes tokens, such as ``PromptLookup`` or ``DraftModel``. Default: none,
            which is plain decoding.
        sampling: temperature and filters; numbers, or arrays of shape ``[]``.
        rule: how drafts are accepted, as for ``exactspec.verify_draft``. A lossy one gives up that
            the text is a sample of the target; ``statistics.exact`` then says so. Trees need
            ``"token"``.
        max_tokens: the most tokens to generate, at least 1.
        stop_tokens: ids that end the text. Default: the tokenizer's end-of-sequence tokens.
        seed: the same seed, model, prompt, drafter and options give the same text, except with an
            ``Adaptive`` drafter under a rule other than ``"coupled"``. Default: drawn from the
            global state, which ``mx.random.seed`` sets.
        logprobs: ``"raw"`` (log-softmax of the logits) or ``"filtered"`` (after ``sampling``) to
            have the log-probability of each token.
        prompt_cache: a cache as from ``mlx_lm.models.cache.make_prompt_cache``, holding the text
            that precedes the prompt, to be continued in place. However the generation ends, the
            cache then holds the prompt and every token that was yielded, and no other; if the
            drafter could not begin the text, it holds what it held before. A generation that is
            suspended keeps its cache, and the drafter's, until it is closed; the next one on either
            of them closes it.
        profile: measure the time of each phase. This waits for the device three times a cycle
            and so makes it a little slower.

    Yields:
        ``GeneratedToken`` items. The last one has a ``finish_reason``.

    Raises:
        TypeError, ValueError: with the first token, for arguments out of range, for a cache that
            cannot be rolled back (rotating, recurrent) with a drafter, and for a model that does
            not show its hidden states to a drafter that needs them; for a cache of another number
            of layers than the model's, one that another thread generates with, one whose last text
            could not be ended (interrupted twice, or the model failed), and under ``"coupled"`` one
            whose number of tokens is not known.
        RuntimeError: for a drafter or a cache that another text has begun with meanwhile.
        NonFiniteLogitsError: for NaN or infinite logits, after the tokens before them.
    """
    holder = Holder()
    text = _text(
        holder,
        *(model, tokenizer, prompt, drafter, sampling, rule, max_tokens, stop_tokens, seed),
        *(logprobs, prompt_cache, profile),
    )
    stream = _until_superseded(text)
    holder.generator = weakref.ref(stream)
    return stream


def _until_superseded(text: Iterator[GeneratedToken]) -> Iterator[GeneratedToken]:
    try:
        yield from text
    except Superseded:
        yield None  # to the text that takes the caches over
        raise RuntimeError(
            "[stream_generate] prompt_cache: expected one that still serves this text, got one "
            "that another text began with; use one for each text"
        ) from None


def _text(
    holder: Holder,
    model: Any,
    tokenizer: Any,
    prompt: str | list[int] | mx.array,
    drafter: Drafter | None,
    sampling: Sampling,
    rule: Rule,
    max_tokens: int,
    stop_tokens: Collection[int] | None,
    seed: int | None,
    logprobs: str | None,
    prompt_cache: list[Any] | None,
    profile: bool,
) -> Iterator[GeneratedToken]:
    check_options(drafter, sampling, rule, max_tokens, seed)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    caches = [("stream_generate", model, prompt_cache)]
    for part in model_drafters(drafter):
        caches.append((type(part).__name__, part.model, part.prompt_cache))
    for op, its_model, cache in caches:
        if cache is not None:
            check_layers(op, its_model, cache)
    statistics = Statistics()
    target = None
    text: list[int] = []  # what the caches are to hold, once the drafter has begun
    # While a cycle is open: the length of the text before it, and the drafts accepted in it.
    cycle_start, num_accepted = None, 0
    try:
        for op, _, cache in caches:
            if cache is not None:
                holder.claim(f"[{op}] prompt_cache", cache)
        target = CachedModel(model, prompt_cache, op="stream_generate")
        prompt = _prompt_tokens(prompt, tokenizer, target.vocab_size, target.length == 0)
        if drafter is None:
            drafter = Drafter()
        else:
            target.check_trimmable("stream_generate", len(prompt) + max_tokens)
            if drafter.proposes_trees:
                target.check_tree("stream_generate")
        if rule == "coupled" and target.length is None:
            raise ValueError(
                "[stream_generate] prompt_cache: expected one that counts its tokens or was empty "
                "when stream_generate began with it, for the rule 'coupled', got "
                f"{type(target.cache[0]).__name__} with an unknown number"
            )
        if stop_tokens is None:
            stop_tokens = tokenizer.eos_token_ids
        else:
            stop_tokens = _token_ids("stop_tokens", "token ids", stop_tokens)
        stop_tokens = frozenset(stop_tokens)
        detokenizer = Detokenizer(tokenizer, prompt)
        statistics.prompt_tokens = len(prompt)
        clock = _PhaseClock(statistics, profile)
        if seed is None:
            seed = int(mx.random.randint(0, 2**32, (2,), mx.uint32).view(mx.uint64).item())

        def receive(hidden: mx.array) -> None:
            if drafter._serves is statistics:
                drafter.receive(hidden)

        if drafter.needs_hidden_states:
            drafter.receive(target.hand_over_hidden_states("stream_generate", receive))

        finish_reason = None
        clear_at = CLEAR_EVERY
        for part in model_drafters(drafter):
            part._model = None  # of its last text
        drafter._serves = statistics
        start = time.perf_counter()
        position = (target.length or 0) + len(prompt)
        drafter.begin(
            prompt,
            tokenizer=tokenizer,
            sampling=sampling,
            max_tokens=max_tokens,
            rule=rule,
            position=position,
        )
        text = list(prompt)
        target.settle(prompt, 0)
        target.prefill()
        statistics.prompt_time = time.perf_counter() - start
        while finish_reason is None:
            cycle_start, num_accepted = len(text), 0
            room = max_tokens - statistics.generated_tokens
            if drafter._serves is not statistics:
                raise RuntimeError(
                    "[stream_generate] drafter: expected one that still serves this text, got "
                    f"a {type(drafter).__name__} that began another; use one for each text"
                )
            start = clock.start()
            at = position + statistics.generated_tokens
            if rule == "coupled":
                draft_key = verify_key = mx.random.key(seed)
            else:
                # Were noise shared between drafting, verification and the next cycle, residual
                # draws would be biased. Every cycle begins at another position.
                draft_key = noise_keys(seed, at, "draft", 0)
                verify_key = noise_keys(seed, at, "verify")
            # A cycle yields one token more than it accepts.
            draft = propose(drafter, min(room - 1, MAX_DRAFT_TOKENS), draft_key)
            clock.lap("draft_time", draft.draft_tokens)
            logits = _feed(target, draft)
            clock.lap("target_time", logits)
            cycle = _verify(logits, draft, sampling, rule, verify_key, at, logprobs)
            clock.lap("verify_time")
            items = _stream(cycle, room, stop_tokens, detokenizer, statistics)
            seconds = time.perf_counter() - start
            # An accepted draft behind a stop token is no text.
            statistics._count_cycle(cycle.num_drafts, [i.source for i in items], seconds)
            statistics.exact &= cycle.exact
            drafter.observe(cycle.num_drafts, cycle.num_accepted, seconds)
            tokens = [item.token for item in items]
            text += tokens
            num_accepted = min(cycle.num_accepted, len(tokens))
            for item in items:
                finish_reason = item.finish_reason
                statistics.generated_tokens += 1
                yield item
            target.settle(tokens, num_accepted, cycle.path)
            cycle_start = None
            if drafter._serves is statistics:
                drafter.extend(tokens, num_accepted)
            if cycle.error is not None and finish_reason is None:
                raise cycle.error
            if statistics.generated_tokens >= clear_at:
                mx.clear_cache()
                clear_at += CLEAR_EVERY
    finally:
        # What the consumer did not get is no text: it went away, or an error came between.
        del text[statistics.prompt_tokens + statistics.generated_tokens :]
        serves = drafter is not None and drafter._serves is statistics
        models = [] if target is None else [target]
        if serves:
            models += [part._model for part in model_drafters(drafter) if part._model is not None]
        try:
            if serves and cycle_start is not None:
                tokens = text[cycle_start:]
                drafter.extend(tokens, min(num_accepted, len(tokens)))
        except CacheChangedError:
            pass  # the cache is no longer this text's
        finally:
            try:
                _leave(holder, models, text)
            finally:
                if serves:
                    drafter.finish()


def _leave(holder: Holder, models: list[CachedModel], text: list[int]) -> None:
    """Leave the caches with the text, and to others; an interruption has it done again."""
    try:
        is_whole = all([model.leave(text) for model in models])
    except BaseException:
        if all([model.leave(text) for model in models]):
            holder.release()
        raise
    if is_whole:
        holder.release()


def generate(
    model: Any, tokenizer: Any, prompt: str | list[int] | mx.array, **options: Any
) -> Generation:
    """Generate a text at once.

    Args:
        model, tokenizer, prompt, options: as for ``stream_generate``.

    Raises:
        As ``stream_generate``. A ``NonFiniteLogitsError`` has the text before it in ``partial``.
    """
    items: list[GeneratedToken] = []
    try:
        items.extend(stream_generate(model, tokenizer, prompt, **options))
    except NonFiniteLogitsError as error:
        error.partial = Generation.join(items) if items else None
        raise
    return Generation.join(items)


class _Cycle(NamedTuple):
    """What a cycle decided, on the host."""

    tokens: list[int]  # the accepted drafts and, unless there is an error, one token more
    sources: list[str]
    logprobs: list[float | None]
    num_drafts: int
    num_accepted: int
    path: list[int] | None  # of a tree: the accepted nodes
    exact: bool
    error: NonFiniteLogitsError | None


def _feed(target: CachedModel, draft: Draft) -> mx.array:
    """The rows of logits that judge the draft: of the text's last token, then of each draft."""
    if draft.parents is None:
        return target.feed(draft.draft_tokens)
    return target.feed_tree(draft.draft_tokens, draft.parents)


def _verify(
    logits: mx.array,
    draft: Draft,
    sampling: Sampling,
    rule: Rule,
    key: mx.array,
    position: int,
    logprobs: str | None,
) -> _Cycle:
    common = {
        "draft_logits": draft.draft_logits,
        "draft_ids": draft.draft_ids,
        "draft_probs": draft.draft_probs,
        "draft_vocab": draft.draft_vocab,
        "draft_stats": draft.draft_stats,
        "sampling": sampling,
        "draft_sampling": draft.draft_sampling,
        "keys": key,
        "logprobs": logprobs,
    }
    path = None
    if draft.parents is None:
        positions = mx.array(position, mx.int32) if rule == "coupled" else None
        result = verify_draft(logits, draft.draft_tokens, rule=rule, positions=positions, **common)
    elif rule != "token":
        raise ValueError(
            f"[stream_generate] rule: expected 'token' for a draft that is a tree, got {rule!r}"
        )
    else:
        parents = mx.array(draft.parents, mx.int32)
        result = verify_tree(logits, draft.draft_tokens, parents, **common)
        path = result.path
    temperature = sampling.temperature
    outputs = [
        *(result.tokens, result.num_accepted, result.status, result.logprobs, path),
        *(draft.draft_tokens, draft.status, temperature),
    ]
    mx.eval(outputs)  # the only wait for the device in a cycle
    tokens, num_accepted, status, values, path, drafts, draft_status, temperature = (
        output.tolist() if isinstance(output, mx.array) else output for output in outputs
    )
    # A draft ends at its first placeholder.
    num_drafts = (*drafts, PLACEHOLDER_TOKEN).index(PLACEHOLDER_TOKEN)
    is_complete = num_accepted == num_drafts
    if path is not None:
        path = path[:num_accepted]
        used = [drafted != PLACEHOLDER_TOKEN for drafted in drafts]
        num_drafts = max((depth for depth, u in zip(depths(draft), used) if u), default=0)
        end = path[-1] if path else -1
        is_complete = not any(u and parent == end for parent, u in zip(draft.parents, used))
    # Below the smallest normal float32 a temperature counts as 0, and then no draft row is read.
    is_greedy = temperature < LEAST_TEMPERATURE
    reads_draft = not is_greedy and rule != "coupled" and not isinstance(rule, Typical)
    # The status of the draft row that ended the draft, if the text came to it: a row that the rule
    # does not read ends the draft only, as do rows of a tree, where other nodes go on.
    drawn = 0
    if draft_status and path is None and num_accepted < len(drafts):
        drawn = draft_status[num_accepted]
    if (status | drawn) & Status.BAD_PARAMETER:
        raise ValueError(
            "[stream_generate] sampling: expected a finite temperature >= 0, top_p and min_p in "
            "[0, 1], got an array with another value"
        )
    if status & Status.NON_FINITE_TARGET:
        error = NonFiniteLogitsError(0, num_accepted, "target")
    elif status & Status.BAD_DRAFT or drawn & Status.NON_FINITE_TARGET and reads_draft:
        error = NonFiniteLogitsError(0, num_accepted, "draft")
    else:
        error = None
    num_tokens = num_accepted + (error is None)
    last_source = "bonus" if is_complete else "residual"
    return _Cycle(
        tokens[:num_tokens],
        (["draft"] * num_accepted + [last_source])[:num_tokens],
        values[:num_tokens] if values else [None] * num_tokens,
        num_drafts,
        num_accepted,
        path,
        is_exact(rule) or is_greedy or num_drafts == 0,
        error,
    )


def _stream(
    cycle: _Cycle,
    room: int,
    stop_tokens: frozenset[int],
    detokenizer: Detokenizer,
    statistics: Statistics,
) -> list[GeneratedToken]:
    """The tokens of a cycle up to a stop token, at most ``room``, with their text."""
    items = []
    for token, source, logprob in zip(cycle.tokens, cycle.sources, cycle.logprobs):
        finish_reason, text = None, ""
        if token in stop_tokens:
            finish_reason = "stop"
        else:
            text = detokenizer.add(token)
            if len(items) + 1 == room:
                finish_reason = "length"
        if finish_reason is not None:
            text += detokenizer.finish()
        items.append(GeneratedToken(text, token, source, logprob, finish_reason, statistics))
        if finish_reason is not None:
            break
    return items


class _PhaseClock:
    """Adds the time of each phase to the statistics, waiting for the device at its end."""

    def __init__(self, statistics: Statistics, enabled: bool):
        self._statistics = statistics
        self._enabled = enabled
        if enabled:
            statistics.draft_time = statistics.target_time = statistics.verify_time = 0.0

    def start(self) -> float:
        self._last = time.perf_counter()
        return self._last

    def lap(self, phase: str, *outputs: mx.array) -> None:
        if self._enabled:
            mx.eval(outputs)
            now = time.perf_counter()
            setattr(self._statistics, phase, getattr(self._statistics, phase) + now - self._last)
            self._last = now


def _prompt_tokens(
    prompt: str | list[int] | mx.array,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
    is_new: bool,
) -> list[int]:
    if isinstance(prompt, str):
        # A chat template may have put the beginning-of-text token there already.
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        prompt = tokenizer.encode(prompt, add_special_tokens=is_new and not has_bos)
    elif isinstance(prompt, mx.array):
        if prompt.ndim != 1 or not mx.issubdtype(prompt.dtype, mx.integer):
            raise ValueError(
                "[stream_generate] prompt: expected integers of shape [n], got "
                f"{prompt.dtype} of shape {list(prompt.shape)}"
            )
        prompt = prompt.tolist()
    else:
        prompt = _token_ids("prompt", "a string, token ids or an array", prompt)
    if not prompt:
        raise ValueError("[stream_generate] prompt: expected at least one token, got none")
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"[stream_generate] prompt: expected ids in [0, {vocab_size}), got "
                f"{describe_number(token)}"
            )
    return prompt


def _token_ids(argument: str, expected: str, values: Iterable[int]) -> list[int]:
    """The ids as Python integers; ``TypeError`` for anything else."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _type_error(argument, expected, values)
    ids = list(values)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TypeError(f"[stream_generate] {argument}: expected integers, got {token!r}")
    return [int(token) for token in ids]


def check_options(drafter: Any, sampling: Any, rule: Any, max_tokens: Any, seed: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for options that ``stream_generate`` refuses."""
    check_sampling("stream_generate", "sampling", sampling)
    check_rule("stream_generate", rule, EXACT_RULES)
    if drafter is not None and not isinstance(drafter, Drafter):
        raise _type_error("drafter", "an exactspec.drafters.Drafter", drafter)
    for name, value in (("max_tokens", max_tokens), ("seed", 0 if seed is None else seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise _type_error(name, "an integer", value)
    if max_tokens < 1:
        raise ValueError(
            f"[stream_generate] max_tokens: expected at least 1, got {describe_number(max_tokens)}"
        )
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(
            f"[stream_generate] seed: expected a value in [0, 2**64), got {describe_number(seed)}"
        )


def _type_error(argument: str, expected: str, got: Any) -> TypeError:
    return TypeError(f"[stream_generate] {argument}: expected {expected}, got {type(got).__name__}")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

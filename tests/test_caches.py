"""Caches of the caller's: whose they are, what they hold after any end of a text, its positions."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from contextlib import contextmanager

import mlx.core as mx
import pytest
from exactspec import Sampling, cached_model, caches, drafters
from exactspec import generate as generate_module
from exactspec.drafters import DraftModel, DraftTree, Hybrid, PromptLookup
from exactspec.generate import generate, stream_generate
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache, trim_prompt_cache
from toy_models import (
    ARCHITECTURES,
    TableModel,
    cached_tokens,
    tiny_llama,
    tiny_model,
    toy_tokenizer,
)

GREEDY = Sampling(temperature=0)
TOKENIZER = toy_tokenizer()
PROMPT = [3, 7, 1, 4, 3, 7, 1]
MORE = [5, 9, 2]


def options(**changes):
    return {"sampling": GREEDY, "max_tokens": 12, "stop_tokens": (), **changes}


def run(model, prompt=PROMPT, **changes):
    return generate(model, TOKENIZER, prompt, **options(**changes))


def stream(model, prompt=PROMPT, **changes):
    return stream_generate(model, TOKENIZER, prompt, **options(**changes))


def counting_model() -> TableModel:
    """Token t is followed by t + 1."""
    rows = 60.0 * (mx.arange(16) == ((mx.arange(16) + 1) % 16)[:, None])
    return TableModel(mx.stack([rows, rows]))


MODELS = {name: tiny_model(name) for name in ARCHITECTURES}


# A suspended text and the next one


def suspended(kind, cache, draft_cache, num_tokens=2):
    """A text of the counting model that is held, with drafts of it in the caches."""
    drafter = {
        "plain": None,
        "lookup": PromptLookup(4, min_ngram=1),
        "model": DraftModel(counting_model(), TOKENIZER, 4, prompt_cache=draft_cache),
        "tree": DraftTree(counting_model(), TOKENIZER, (2, 1, 1), prompt_cache=draft_cache),
        "hybrid": Hybrid(
            PromptLookup(4),
            DraftModel(counting_model(), TOKENIZER, 4, prompt_cache=draft_cache),
        ),
    }[kind]
    text = stream(counting_model(), [2, 3, 4, 5, 1], drafter=drafter, prompt_cache=cache)
    tokens = [next(text).token for _ in range(num_tokens)]
    assert tokens == [2, 3][:num_tokens]
    return text, drafter, [2, 3, 4, 5, 1, *tokens]


KINDS = ["plain", "lookup", "model", "tree", "hybrid"]
WITH_CACHES = ["model", "tree", "hybrid"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_text_closes_one_that_is_suspended(kind):
    cache, draft_cache = [KVCache()], [KVCache()]
    first, drafter, held = suspended(kind, cache, draft_cache)
    if kind != "plain":
        assert cached_tokens(cache) != held  # it has drafts in it
    second = run(counting_model(), [9], prompt_cache=cache)
    assert second.tokens == [10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5]
    assert cached_tokens(cache) == [*held, 9, *second.tokens]
    if kind in WITH_CACHES:
        assert cached_tokens(draft_cache) == held
    with pytest.raises(RuntimeError, match=r"\[stream_generate\] prompt_cache: .* still serves"):
        next(first)
    with pytest.raises(StopIteration):
        next(first)
    first.close()
    assert cached_tokens(cache) == [*held, 9, *second.tokens]


@pytest.mark.parametrize("kind", WITH_CACHES)
@pytest.mark.parametrize("same_drafter", [False, True])
def test_the_next_text_of_a_draft_models_cache_closes_it(kind, same_drafter):
    cache, draft_cache = [KVCache()], [KVCache()]
    first, drafter, held = suspended(kind, cache, draft_cache)
    other = DraftModel(counting_model(), TOKENIZER, 2, prompt_cache=draft_cache)
    second = run(counting_model(), [9], drafter=drafter if same_drafter else other)
    assert cached_tokens(cache) == held
    assert cached_tokens(draft_cache) == [*held, 9, *second.tokens]
    with pytest.raises(RuntimeError, match="prompt_cache"):
        next(first)


def test_layers_in_another_list_are_the_same_cache():
    model = MODELS["deepseek_v32"]
    cache = make_prompt_cache(model)
    first = stream(model, prompt_cache=cache, drafter=PromptLookup(4, min_ngram=1))
    tokens = [next(first).token, next(first).token]
    other = [type(layer)(*layer.caches) for layer in cache]
    assert run(model, MORE, prompt_cache=other).tokens == run(model, PROMPT + tokens + MORE).tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_text_that_is_closed_late_feeds_nothing_into_a_changed_cache(kind, end):
    cache, draft_cache = [KVCache()], [KVCache()]
    first, drafter, held = suspended(kind, cache, draft_cache)
    trim_prompt_cache(cache, cache[0].offset)
    ids = mx.array([6, 7, 8]).reshape(1, 1, 3, 1)
    cache[0].update_and_fetch(ids, ids)
    first.close() if end == "close" else None
    del first
    assert cached_tokens(cache) == [6, 7, 8]
    if kind in WITH_CACHES:
        assert cached_tokens(draft_cache) == held
    assert run(counting_model(), [9], prompt_cache=cache, max_tokens=2).tokens == [10, 11]
    assert cached_tokens(cache) == [6, 7, 8, 9, 10, 11]


def test_a_cache_that_was_changed_ends_the_text():
    cache, draft_cache = [KVCache()], [KVCache()]
    for changed in (cache, draft_cache):
        first, drafter, held = suspended("model", cache, draft_cache, num_tokens=1)
        trim_prompt_cache(changed, 3)
        name = "stream_generate" if changed is cache else "DraftModel"
        with pytest.raises(RuntimeError, match=rf"\[{name}\] prompt_cache: .* left it"):
            list(first)
        trim_prompt_cache(cache, cache[0].offset)
        trim_prompt_cache(draft_cache, draft_cache[0].offset)


def test_a_text_that_was_not_begun_holds_nothing():
    cache = [KVCache()]
    first = stream(counting_model(), [1], prompt_cache=cache)
    second = stream(counting_model(), [7], prompt_cache=cache)
    assert next(second).token == 8
    assert next(first).token == 2  # it takes the cache over now
    first.close()
    assert cached_tokens(cache) == [7, 8, 1, 2]
    with pytest.raises(RuntimeError, match="prompt_cache"):
        next(second)


def test_a_running_text_keeps_its_cache():
    cache, errors = [KVCache()], []

    class Reentrant(PromptLookup):
        def draft(self, limit, key):
            thread = threading.Thread(target=lambda: errors.append(refusal()))
            thread.start()
            thread.join()
            errors.append(refusal())
            return super().draft(limit, key)

    def refusal():
        with pytest.raises(ValueError) as caught:
            next(stream(counting_model(), [1], prompt_cache=cache))
        return str(caught.value)

    result = run(counting_model(), [1], drafter=Reentrant(), prompt_cache=cache, max_tokens=3)
    assert len(errors) == 4  # no draft in the last cycle
    assert all("[stream_generate] prompt_cache" in e and "at this moment" in e for e in errors)
    assert cached_tokens(cache) == [1, *result.tokens]


@pytest.mark.parametrize("way", ["break", "drop", "other thread"])
def test_a_consumer_that_breaks_out(way):
    model = tiny_llama()
    for drafter in (None, PromptLookup(4, min_ngram=1), DraftModel(model, TOKENIZER, 4)):
        cache = make_prompt_cache(model)
        text = stream(model, prompt_cache=cache, drafter=drafter)
        tokens = []
        for item in text:
            tokens.append(item.token)
            if len(tokens) == 2:
                break
        if way == "drop":
            del text
            assert cache[0].offset == len(PROMPT + tokens)
        elif way == "other thread":
            mx.eval([layer.state for layer in cache])
            thread = threading.Thread(target=text.close)
            thread.start()
            thread.join()
            assert cache[0].offset == len(PROMPT + tokens)
        second = run(model, MORE, prompt_cache=cache)
        assert second.tokens == run(model, PROMPT + tokens + MORE).tokens


def test_texts_of_several_threads():
    """Each with caches of its own, each interrupted by its next one; and many on one cache."""
    model, draft = tiny_llama(), tiny_llama(noise=0.02)
    expected = run(model).tokens
    shared, results, refused = make_prompt_cache(model), [], []

    def turns():
        cache, draft_cache = make_prompt_cache(model), make_prompt_cache(draft)
        for _ in range(4):
            drafter = DraftModel(draft, TOKENIZER, 3, prompt_cache=draft_cache)
            text = stream(model, prompt_cache=cache, drafter=drafter)
            results.append([next(text).token for _ in range(5)])
            fresh = stream(model, [1], prompt_cache=cache, drafter=drafter)
            next(fresh)
            assert len({layer.offset for layer in cache}) == 1
            for layers in (cache, draft_cache):
                fresh.close()
                trim_prompt_cache(layers, layers[0].offset)
            try:
                next(stream(model, [1], prompt_cache=shared))
            except ValueError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected[:5]] * 16
    # The loser of a race is refused, or closes the other; never do both write.
    assert all("prompt_cache" in message for message in refused)
    assert len({layer.offset for layer in shared}) == 1
    assert shared[0].offset == 2 * (16 - len(refused))


def test_nothing_is_kept_alive():
    cache = [KVCache(), KVCache()]
    model = tiny_llama()
    layer = weakref.ref(cache[0])
    text = stream(model, prompt_cache=cache, drafter=PromptLookup())
    next(text)
    kept = weakref.ref(text)
    assert len(caches._holders) >= 2
    del text, cache
    gc.collect()
    assert layer() is None and kept() is None
    cache = make_prompt_cache(MODELS["mamba"])
    run(MODELS["mamba"], prompt_cache=cache)
    array = weakref.ref(cache[0][0])
    assert cache[0] in caches._counted and cache[0] not in caches._holders
    layer = weakref.ref(cache[0])
    del cache
    gc.collect()
    assert layer() is None and array() is None


# Caches that are none of the model's


def test_caches_of_another_length():
    target, draft = tiny_llama(), tiny_llama(noise=0.02)
    both = [*make_prompt_cache(target), *make_prompt_cache(draft)]
    for cache in (both, both[:1], []):
        message = rf"prompt_cache: expected 2 layers, .* got {len(cache)}"
        with pytest.raises(ValueError, match=rf"\[stream_generate\] {message}"):
            run(target, prompt_cache=cache)
        drafter = DraftModel(draft, TOKENIZER, prompt_cache=cache)
        with pytest.raises(ValueError, match=rf"\[DraftModel\] {message}"):
            run(target, drafter=drafter)
        with pytest.raises(ValueError, match=rf"\[DraftModel\] {message}"):
            run(target, drafter=Hybrid(PromptLookup(), drafter))
        assert all(layer.offset == 0 for layer in cache)
    for cache in (KVCache(), {}, 5):
        with pytest.raises(TypeError, match=r"prompt_cache: expected a list of 2 layers, got"):
            run(target, prompt_cache=cache)
    for layer in (1, None, "layer", mx.zeros(1), object()):
        drafter = DraftModel(draft, TOKENIZER, prompt_cache=[layer, KVCache()])
        expected = rf"prompt_cache: expected layers .* {type(layer).__name__}$"
        with pytest.raises(TypeError, match=rf"\[stream_generate\] {expected}"):
            run(target, prompt_cache=[KVCache(), layer])
        with pytest.raises(TypeError, match=rf"\[DraftModel\] {expected}"):
            run(target, drafter=drafter)


def test_a_layer_that_is_there_twice():
    target = tiny_llama()
    cache = make_prompt_cache(target)
    drafter = DraftModel(target, TOKENIZER, prompt_cache=cache)
    with pytest.raises(ValueError, match=r"\[DraftModel\] prompt_cache: .* KVCache that is there"):
        run(target, prompt_cache=cache, drafter=drafter)
    with pytest.raises(ValueError, match=r"\[stream_generate\] prompt_cache: .* twice"):
        run(target, prompt_cache=[cache[0]] * 2)
    assert run(target, prompt_cache=cache).tokens == run(target).tokens  # and nobody holds it


def test_a_model_whose_own_cache_rotates():
    with pytest.raises(ValueError, match=r"\[stream_generate\] model: .* got RotatingKVCache;"):
        run(MODELS["gemma3_text"], drafter=PromptLookup())
    drafter = DraftModel(MODELS["mamba"], TOKENIZER)
    with pytest.raises(ValueError, match=r"\[DraftModel\] model: .* got ArraysCache;"):
        run(tiny_llama(), drafter=drafter)
    cache = [RotatingKVCache(max_size=8), RotatingKVCache(max_size=8)]
    with pytest.raises(ValueError, match=r"\[stream_generate\] prompt_cache: .* got Rotating"):
        run(tiny_llama(), drafter=PromptLookup(), prompt_cache=cache)


# Interruptions


class Interrupting:
    """In a layer's place: its call number ``at`` is interrupted, before or behind the layer."""

    def __init__(self, layer, at, behind):
        self.layer, self.left, self.behind = layer, at, behind

    def __getattr__(self, name):
        return getattr(self.layer, name)

    def __call__(self, *args, **options):
        self.left -= 1
        if self.left == 0 and not self.behind:
            raise KeyboardInterrupt
        output = self.layer(*args, **options)
        if self.left == 0:
            raise KeyboardInterrupt
        return output


@contextmanager
def second_layer(model, wrap):
    """With another second layer."""
    layers = getattr(model, "backbone", model.get("model")).layers
    layer, layers[1] = layers[1], wrap(layers[1])
    yield layers[1]
    layers[1] = layer


def drafts(name):
    """Whether the architecture takes a drafter for a text of these tests."""
    return name in ("llama", "deepseek_v32", "longcat_flash")


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("drafter", [None, PromptLookup(4, min_ngram=1)], ids=["plain", "lookup"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_interruption_in_the_second_layer(name, drafter, at, behind, monkeypatch):
    if drafter is not None and not drafts(name):
        drafter = None
        at += 1
    model = MODELS[name]
    monkeypatch.setattr(cached_model, "PREFILL_CHUNK", 4)
    cache = make_prompt_cache(model)
    before = run(model, [8, 2], prompt_cache=cache).tokens
    tokens = []
    # A call more tells the width of the logits.
    with second_layer(model, lambda layer: Interrupting(layer, at + 1, behind)) as layer:
        with pytest.raises(KeyboardInterrupt):
            for item in stream(model, prompt_cache=cache, drafter=drafter):
                tokens.append(item.token)
        assert layer.left <= 0
    text = [8, 2, *before, *PROMPT, *tokens, *MORE]
    assert run(model, MORE, prompt_cache=cache).tokens == run(model, text).tokens


def broken_off(model, cache, at, **changes):
    """The tokens of a text that is interrupted at its line number ``at``, and where that was.

    Lines count that run in the loop, the drafters and what handles the cache, and every fifth one
    of the model. At the end ``at`` is not reached.
    """
    own = {m.__file__ for m in (generate_module, drafters, cached_model, caches)}
    counted, place, tokens = 0, None, []

    def trace(frame, event, _):
        nonlocal counted, place
        name = frame.f_code.co_filename
        if name not in own and "mlx_lm/models" not in name:
            return None
        if event == "line":
            counted += 1 if name in own else 0.2
            if counted >= at and place is None and not is_yield(name, frame.f_lineno):
                place = f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return trace

    text = stream(model, prompt_cache=cache, **changes)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for item in text:
            tokens.append(item.token)
    except KeyboardInterrupt:
        assert place is not None
    finally:
        sys.settrace(before)
    return tokens, place


def is_yield(name, line):
    """A token is counted right before it is yielded; no signal is handled between the two."""
    with open(name) as file:
        return file.read().splitlines()[line - 1].strip() == "yield item"


def check_a_text_that_is_broken_off(name, at, drafted) -> str:
    """Whether the cache was "right" or "refused", "" where the text had ended by then."""
    model = MODELS[name]
    cache, draft_cache = make_prompt_cache(model), make_prompt_cache(MODELS["llama"])
    before = run(model, [8, 2, 8], prompt_cache=cache, max_tokens=3).tokens
    text = [8, 2, 8, *before]
    run(MODELS["llama"], text, prompt_cache=draft_cache, max_tokens=1)
    trim_prompt_cache(draft_cache, 1)
    drafter = None
    if drafted:
        drafter = DraftModel(MODELS["llama"], TOKENIZER, 2, prompt_cache=draft_cache)
        drafter = Hybrid(PromptLookup(4, min_ngram=1), drafter)
    tokens, place = broken_off(model, cache, at, drafter=drafter, max_tokens=5)
    if place is None:
        return ""
    pairs = [(model, cache)]
    if drafted:
        pairs.append((MODELS["llama"], draft_cache))
    begun = []
    for its_model, its_cache in pairs:
        try:
            more = run(its_model, MORE, prompt_cache=its_cache, max_tokens=6).tokens
        except ValueError as error:
            assert "[stream_generate] prompt_cache: expected a cache that holds a whole" in str(
                error
            )
            return "refused"
        if more == run(its_model, [*text, *PROMPT, *tokens, *MORE], max_tokens=6).tokens:
            begun.append(True)
        else:
            # It did not begin: where no token was yielded, the cache may be what it was.
            assert not tokens, place
            assert more == run(its_model, [*text, *MORE], max_tokens=6).tokens, place
            begun.append(False)
    assert len(set(begun)) == 1, place
    return "right"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_interruptions_anywhere(name):
    """A few of the places that ``test_interruptions_everywhere`` tries."""
    outcomes = {check_a_text_that_is_broken_off(name, at, drafts(name)) for at in (150, 290, 447)}
    assert outcomes <= {"right", "refused", ""} and "right" in outcomes


@pytest.mark.prove
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_interruptions_everywhere(name):
    outcomes, at = [], 1
    while not outcomes or outcomes[-1]:
        outcomes.append(check_a_text_that_is_broken_off(name, at, drafts(name)))
        at += 7
    assert outcomes.count("right") > 0.9 * len(outcomes), outcomes


def test_a_cache_that_could_not_be_put_in_order_is_refused():
    model, cache = tiny_llama(), make_prompt_cache(tiny_llama())
    text = stream(model, prompt_cache=cache)
    next(text)

    class Failing(Interrupting):
        def __call__(self, *_, **__):
            raise OSError("the device is gone")

    with second_layer(model, lambda layer: Failing(layer, 1, False)), pytest.raises(OSError):
        text.close()
    for layers in (cache, [cache[1], KVCache()]):
        with pytest.raises(ValueError, match=r"\[stream_generate\] prompt_cache: .* interrupted"):
            run(model, prompt_cache=layers)
    drafter = DraftModel(model, TOKENIZER, prompt_cache=cache)
    with pytest.raises(ValueError, match=r"\[DraftModel\] prompt_cache: .* interrupted"):
        run(model, drafter=drafter)
    # Others of the model are free, also those that a refused text named first.
    fresh = make_prompt_cache(model)
    with pytest.raises(ValueError):
        run(model, prompt_cache=fresh, drafter=drafter)
    assert run(model, prompt_cache=fresh).tokens == run(model).tokens


class OpaqueCache(KVCache):
    """Keeps something that cannot be saved."""

    def __init__(self, trimmable):
        super().__init__()
        self.handle, self.trimmable = object(), trimmable

    def is_trimmable(self):
        return self.trimmable


@pytest.mark.parametrize("trimmable", [False, True])
def test_an_interrupted_cache_of_an_unknown_kind(trimmable):
    model = tiny_llama()
    cache, tokens = [OpaqueCache(trimmable), OpaqueCache(trimmable)], []
    with second_layer(model, lambda layer: Interrupting(layer, 5, True)):
        with pytest.raises(KeyboardInterrupt):
            for item in stream(model, prompt_cache=cache):
                tokens.append(item.token)
    assert tokens
    if trimmable:
        expected = run(model, PROMPT + tokens + MORE).tokens
        assert run(model, MORE, prompt_cache=cache).tokens == expected
    else:
        with pytest.raises(ValueError, match=r"\[stream_generate\] prompt_cache: .* interrupted"):
            run(model, MORE, prompt_cache=cache)


def test_a_snapshot_is_not_what_is_written_to():
    for name, model in MODELS.items():
        cache = make_prompt_cache(model)
        run(model, prompt_cache=cache)
        saved = copy.deepcopy(cache)
        snapshot, mark = caches.Snapshot(cache), caches.Fingerprint(cache)
        assert mark.matches(cache)
        # Fed alone, a token is written into the window of a full rotating cache.
        run(model, [5], prompt_cache=cache)
        assert not mark.matches(cache), name
        assert snapshot.restore()
        again, expected = (run(model, MORE, prompt_cache=c).tokens for c in (cache, saved))
        assert again == expected, name


# Positions under the coupled rule


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_coupled_noise_goes_by_the_position_in_the_text(name):
    """A text that is split between cache and prompt is the whole one's, and no turn is another's
    again."""
    model = MODELS[name]
    coupled = {"sampling": Sampling(temperature=3), "rule": "coupled", "seed": 3, "max_tokens": 8}
    whole = run(model, PROMPT, **coupled | {"max_tokens": 20}).tokens
    cache = make_prompt_cache(model)
    turns = [run(model, PROMPT, prompt_cache=cache, **coupled | {"max_tokens": 5}).tokens]
    for start in (5, 13):
        turns.append(run(model, whole[start - 1 : start], prompt_cache=cache, **coupled).tokens)
        assert turns[-1] != whole[start : start + 8]  # the token is there twice now
    text = [*PROMPT, *turns[0], whole[4], *turns[1], whole[12]]
    assert turns[2] == run(model, text, **coupled).tokens
    for tokens in range(1, len(PROMPT)):
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([PROMPT[:tokens]]), cache=cache))
        if name == "mamba":
            message = r"\[stream_generate\] prompt_cache: .* 'coupled', got ArraysCache"
            with pytest.raises(ValueError, match=message):
                run(model, PROMPT[tokens:], prompt_cache=cache, **coupled)
            assert len(run(model, PROMPT[tokens:], prompt_cache=cache).tokens) == 12
            continue
        split = run(model, PROMPT[tokens:], prompt_cache=cache, **coupled).tokens
        assert split == whole[:8]


def test_the_count_of_a_recurrent_cache_is_no_other_caches():
    model = MODELS["mamba"]
    coupled = {"sampling": Sampling(), "rule": "coupled", "seed": 3}
    cache = make_prompt_cache(model)
    run(model, prompt_cache=cache)
    for change in ("copy", "fed", "other states"):
        changed = copy.deepcopy(cache)
        if change == "fed":
            changed = cache
            mx.eval(model(mx.array([[1]]), cache=changed))
        elif change == "other states":
            changed = make_prompt_cache(model)
            run(model, prompt_cache=changed)
            changed[1].cache = [mx.array(a) for a in changed[1].cache]
        with pytest.raises(ValueError, match="unknown number"):
            run(model, MORE, prompt_cache=changed, **coupled)
    for layer in cache:
        layer.cache = [None, None]
    assert run(model, prompt_cache=cache, **coupled).tokens == run(model, **coupled).tokens


# The device's memory


def test_buffers_are_given_back_while_decoding(monkeypatch):
    cleared = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(len(tokens)))
    for drafter, every in ((None, 256), (PromptLookup(4, min_ngram=1), 256)):
        tokens = []
        cleared.clear()
        for item in stream(counting_model(), [1], drafter=drafter, max_tokens=600):
            tokens.append(item.token)
        assert len(cleared) == 2 and all(0 <= n - m * every < 5 for m, n in enumerate(cleared, 1))

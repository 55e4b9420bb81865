"""What an mlx-lm cache holds, how to put it back, and which text it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

# What never changes in place, so that a reference keeps it.
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type, mx.Dtype)


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """The caches of all layers, also of those that have several."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from leaves(layer.caches)
        else:
            yield layer


# Taking a cache back


class Snapshot:
    """All that the layers of a cache hold, to be put back.

    Arrays are shared, not copied: where a model writes into one, it makes a new array as long as
    the snapshot lives. So drop it before anything is evaluated, and nothing is ever copied.
    """

    def __init__(self, cache: Sequence[Any]):
        self._saved = [(leaf, *_saved(leaf)) for leaf in leaves(cache)]

    def restore(self) -> bool:
        """Put everything back; whether that was possible. It may be called again."""
        is_whole = True
        for leaf, attributes, offset in self._saved:
            if attributes is not None:
                leaf.__dict__ = attributes
            elif offset is not None and leaf.is_trimmable():
                leaf.trim(leaf.offset - offset)
            else:
                is_whole = False
        return is_whole


def _saved(leaf: Any) -> tuple[dict[str, Any] | None, int | None]:
    """The attributes of a leaf, None if they cannot be kept, and its offset."""
    try:
        return {name: _kept(value) for name, value in vars(leaf).items()}, _offset(leaf)
    except TypeError:
        return None, _offset(leaf)


def _kept(value: Any) -> Any:
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, mx.array):
        return value[...]  # the object itself is what is written to
    if type(value) in (list, tuple):
        return type(value)(_kept(item) for item in value)
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    raise TypeError(type(value).__name__)


class Fingerprint:
    """Tells whether a cache is as it was.

    Arrays are compared as objects and not by content, which leaves one case: a cache that was
    trimmed and fed again to the same length.
    """

    def __init__(self, cache: Sequence[Any]):
        self._seen = [(leaf, _values(leaf)) for leaf in leaves(cache)]

    def matches(self, cache: Sequence[Any]) -> bool:
        now = Fingerprint(cache)._seen
        return len(now) == len(self._seen) and all(
            leaf is seen_leaf and len(values) == len(seen) and all(map(_is_same, values, seen))
            for (leaf, values), (seen_leaf, seen) in zip(now, self._seen)
        )


def _values(leaf: Any) -> list[Any]:
    """What a leaf holds, also in its lists."""
    values: list[Any] = []
    for value in getattr(leaf, "__dict__", {}).values():
        if isinstance(value, (list, tuple)):
            values += value
        else:
            values.append(value)
    return values


def _arrays(leaf: Any) -> list[mx.array]:
    return [value for value in _values(leaf) if isinstance(value, mx.array)]


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, (int, float, str)) and type(a) is type(b) and a == b)


# Counting its tokens


def _offset(leaf: Any) -> int | None:
    offset = getattr(leaf, "offset", None)
    return offset if isinstance(offset, int) else None


# Leaf without an offset -> tokens that were fed to it, and weak references to what it held then.
_counted: weakref.WeakKeyDictionary[Any, tuple[int, list[Any]]] = weakref.WeakKeyDictionary()


def token_count(cache: Sequence[Any]) -> int | None:
    """Tokens that a cache has seen; None if it does not count them and ``remember`` did not."""
    offsets = [offset for leaf in leaves(cache) if (offset := _offset(leaf)) is not None]
    if offsets:
        return max(offsets)  # a layer may not use its cache
    counts = {_remembered(leaf) for leaf in leaves(cache)}
    return counts.pop() if len(counts) == 1 else None


def remember(cache: Sequence[Any], count: int) -> None:
    """Keep in mind how many tokens a cache has seen, as long as it is as it is now."""
    for leaf in leaves(cache):
        if _offset(leaf) is None:
            _counted[leaf] = count, [weakref.ref(array) for array in _arrays(leaf)]


def _remembered(leaf: Any) -> int | None:
    arrays = _arrays(leaf)
    if not arrays:
        return 0
    count, held = _counted.get(leaf, (None, []))
    is_same = len(held) == len(arrays) and all(h() is a for h, a in zip(held, arrays))
    return count if is_same else None


# Whose it is


class Superseded(Exception):
    """Thrown into the generator of a text when another one begins on its cache."""


_holders: weakref.WeakKeyDictionary[Any, Holder] = weakref.WeakKeyDictionary()


class Holder:
    """Who holds the caches of a text while it is generated, so that no two texts use one.

    A holder that is never released keeps its caches from every other text: what they hold is then
    unknown.

    Attributes:
        generator: a weak reference to the text's generator. On ``Superseded`` it must release the
            holder and yield.
    """

    def __init__(self):
        self.generator: weakref.ref = lambda: None
        self._held: list[weakref.ref] = []

    def claim(self, argument: str, cache: Sequence[Any]) -> None:
        """Hold a cache; a text that is suspended with it ends, and the cache then holds that text.

        Args:
            argument: what the caller calls it, for errors, such as "[op] prompt_cache".

        Raises:
            ValueError: for a cache that another text uses at this moment, one whose last text
                could not be ended, and one that this holder holds already.
        """
        for leaf in leaves(cache):
            if any(reference() is leaf for reference in self._held):
                raise ValueError(
                    f"{argument}: expected layers that nothing else uses, got a "
                    f"{type(leaf).__name__} that is there twice, or in another model's cache"
                )
            self._held.append(weakref.ref(leaf))
            while (holder := _holders.setdefault(leaf, self)) is not self:
                holder._give_up(argument)

    def release(self) -> None:
        """Let other texts use the caches."""
        for leaf in self._leaves():
            del _holders[leaf]

    def _leaves(self) -> list[Any]:
        leaves = [reference() for reference in self._held]
        return [leaf for leaf in leaves if leaf is not None and _holders.get(leaf) is self]

    def _give_up(self, argument: str) -> None:
        generator, error = self.generator(), None
        if generator is not None:
            if not generator.gi_running:
                try:
                    generator.throw(Superseded())
                except Exception as failure:
                    error = failure
            if generator.gi_running:
                raise ValueError(
                    f"{argument}: expected a cache that no other text uses, got one whose text is "
                    "being generated at this moment"
                )
        if self._leaves():
            raise ValueError(
                f"{argument}: expected a cache that holds a whole text, got one whose last text "
                "was interrupted or failed while it was ended; make a new one"
            ) from error

"""Where the n-grams of a growing text occurred last, in a few bytes a token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

FIRST_SLOTS = 64


class NgramIndex:
    """A text, token by token, and for each of its n-grams the latest places where it occurred.

    For each length there is a hash table with one entry for each n-gram: the position of the token
    that followed it last. The n-gram itself is what stands before that position in the text. Tables
    are a quarter to half full, so that a token takes the same number of steps, on average, at any
    length of the text.

    Args:
        lengths: of the n-grams, in the order in which ``matches`` looks for them.
        num_latest: places kept of each n-gram.

    Attributes:
        text: the tokens so far.
        steps: entries of the tables looked at so far.
    """

    def __init__(self, lengths: range, num_latest: int):
        self.text = array("i")
        self.steps = 0
        self._num_latest = num_latest
        # Length -> positions by hash; 0 is none, since something stands before every follower.
        self._tables = {n: _zeros(FIRST_SLOTS) for n in lengths}
        self._counts = dict.fromkeys(lengths, 0)
        # Length -> for each position the one before it that followed the same n-gram, or 0.
        self._earlier = {n: array("i") for n in lengths} if num_latest > 1 else {}

    def append(self, token: int) -> None:
        """Append a token. Only now do the n-grams at the end have a follower."""
        position = len(self.text)
        for n, table in self._tables.items():
            earlier = 0
            if n <= position:
                slot = self._slot(table, n, position)
                earlier, table[slot] = table[slot], position
                if not earlier:
                    self._counts[n] += 1
                    if 2 * self._counts[n] > len(table):
                        self._grow(n)
            if self._earlier:
                self._earlier[n].append(earlier)
        self.text.append(token)

    def matches(self) -> Iterator[int]:
        """Positions after earlier occurrences of the n-grams that end the text, latest first."""
        end = len(self.text)
        for n, table in self._tables.items():
            position = table[self._slot(table, n, end)]
            for _ in range(self._num_latest):
                if not position:
                    break
                yield position
                position = self._earlier[n][position] if self._earlier else 0

    def _slot(self, table: array, n: int, end: int) -> int:
        """Where a table has the n-gram before ``end``, or a free place for it."""
        ngram = self.text[end - n : end].tobytes()
        last = len(table) - 1  # all ones in binary
        slot = hash(ngram) & last  # with a secret of the process: no prompt can aim at one slot
        self.steps += 1
        while (known := table[slot]) and self.text[known - n : known].tobytes() != ngram:
            slot = (slot + 1) & last
            self.steps += 1
        return slot

    def _grow(self, n: int) -> None:
        old, self._tables[n] = self._tables[n], _zeros(2 * len(self._tables[n]))
        for position in filter(None, old):
            self._tables[n][self._slot(self._tables[n], n, position)] = position


def _zeros(size: int) -> array:
    return array("i", bytes(array("i").itemsize * size))

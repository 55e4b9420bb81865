"""Text from tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Tokens before the text, so that its first one is not taken for the first of all.
CONTEXT = 4

# A UTF-8 character that is not complete has at most three bytes, and so at most three tokens.
MOST_PENDING = 3

INVALID = "\ufffd"


class Detokenizer:
    """Turns the tokens that continue a text into what they add to it, character by character.

    The pieces joined are what the tokenizer's ``decode`` makes of prompt and tokens, without what
    it makes of the prompt: a space before the first word stays. The tokenizer is not asked to tidy
    spaces up. Bytes that are no UTF-8 become U+FFFD. The cost of a token does not grow with the
    text: with it, only the few tokens before it are decoded.

    Args:
        tokenizer: anything with Hugging Face's ``decode``.
        prompt: ids of the tokens before.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._prompt = list(prompt[-CONTEXT:])
        self._last = self._prompt  # tokens whose text is out
        self._pending: list[int] = []  # those after them

    def add(self, token: int) -> str:
        """The text that becomes certain with ``token``: complete characters only."""
        self._pending.append(token)
        text = self._text(self._pending)
        if text and not text.endswith(INVALID):
            return self._release(len(self._pending), text)
        if len(self._pending) <= MOST_PENDING:
            return ""
        # Bytes that were never a character. Release them, but not the beginning of a new one:
        # where decoding in two parts gives the same, no character lies across the cut.
        for cut in range(len(self._pending) - 1, 0, -1):
            first = self._text(self._pending[:cut])
            if first + self._decode(self._pending[cut:]) == text:
                return self._release(cut, first)
        return ""

    def finish(self) -> str:
        """What is left at the end of the text, such as a character that was cut off."""
        return self._release(len(self._pending), self._text(self._pending))

    def _release(self, count: int, text: str) -> str:
        if text:  # ids without a text, such as those of padding, are no context
            self._last = self._pending[:count]
        del self._pending[:count]
        return text

    def _text(self, tokens: list[int]) -> str:
        """What ``tokens`` add to the text before them."""
        for context in (self._last, self._prompt):
            before, after = self._decode(context), self._decode(context + tokens)
            # Else a broken character changed what stands before it.
            if after.startswith(before):
                return after[len(before) :]
        return self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

# SPDX-License-Identifier: Apache-2.0
"""The text of an answer whose tokens come one after another. Pure but for the tokenizer that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["AnswerText"]

UNFINISHED = "\ufffd"
"""Tokenizers decode the first bytes of a longer character as this one."""


class AnswerText:
    """Tokens in, text out. tokenizer: None gives no text. stops: texts that end the answer and are no part of it.

    Text is held back while it may still change: while its last character is incomplete, or may begin a stop. All texts that
    `add` returned, put together, are the tokens' text up to the first stop.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop came. Then nothing more does."""
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0
        self._held = ""

    def add(self, tokens: Sequence[int], last: bool) -> str:
        """The text that is certain now and was not before. last: no token comes after these, so that nothing is held back."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens += tokens
        self._held += self._decoded(last)
        # Of all stops the one that is complete first, however the tokens are divided; of two that end together the longer.
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def take(self, tokens: Sequence[int], last: bool) -> tuple[str, int]:
        """As `add`, and how many of these tokens the answer has: none behind the one that completes a stop, however many came
        together with it."""
        if not self._stops or len(tokens) < 2:
            return self.add(tokens, last), len(tokens)
        text = ""
        for count, token in enumerate(tokens, 1):
            text += self.add([token], last and count == len(tokens))
            if self.stopped:
                return text, count
        return text, len(tokens)

    def _decoded(self, last: bool) -> str:
        # A token's text depends on those before it (a space at its front, bytes of one character), so the last tokens that were
        # read are decoded again, and the text behind theirs is new.
        before = self._text(self._tokens[self._context : self._read])
        now = self._text(self._tokens[self._context :])
        if now.endswith(UNFINISHED) and not last:
            return ""
        # Where what came has no text of its own, those before it still say how the next begins.
        if len(now) > len(before):
            self._context, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """How long an end of the text is that may begin this stop, at most."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

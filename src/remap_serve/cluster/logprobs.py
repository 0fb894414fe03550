# SPDX-License-Identifier: Apache-2.0
"""Logprobs as OpenAI writes them: of completions as four lists, of chats as one object for each token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .vocabulary import shown

if TYPE_CHECKING:
    from remap_serve.engine.request import TokenLogprobs

    from .vocabulary import Vocabulary

__all__ = ["LogprobText", "joined"]


class LogprobText:
    """Of one choice, whose tokens come one after another. chat: in which of the two forms."""

    def __init__(self, vocabulary: Vocabulary, chat: bool) -> None:
        self._vocabulary = vocabulary
        self._chat = chat
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._begun = False

    def of_first(self, token: int) -> dict[str, Any]:
        """Of the prompt's first token in an echo: nothing comes before it, so that it has no logprob."""
        return self._completion([(token, None, None)])

    def of(self, noted: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the tokens that come next."""
        if self._chat:
            return {"content": [self._entry(one.token, one.logprob) | self._top(one) for one in noted]}
        return self._completion([(one.token, one.logprob, self._likeliest(one)) for one in noted])

    def _completion(self, found: Iterable[tuple[int, float | None, dict[str, float] | None]]) -> dict[str, Any]:
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, top in found:
            made["tokens"].append(shown(self._vocabulary.bytes_of(token)))
            made["token_logprobs"].append(logprob)
            made["top_logprobs"].append(top)
            made["text_offset"].append(self._place(token))
        return made

    def _place(self, token: int) -> int:
        """Where the token's text begins, in characters that are complete before it."""
        place, data = self._offset, self._vocabulary.in_text(token, not self._begun)
        self._begun = self._begun or bool(data)
        self._offset += len(self._decoder.decode(data))
        return place

    def _likeliest(self, noted: TokenLogprobs) -> dict[str, float]:
        """By their text, of which two tokens may have the same: then it is the likelier one's. The token itself is among them."""
        found: dict[str, float] = {}
        for token, logprob in (*noted.top, (noted.token, noted.logprob)):
            found.setdefault(shown(self._vocabulary.bytes_of(token)), logprob)
        return found

    def _top(self, noted: TokenLogprobs) -> dict[str, Any]:
        return {"top_logprobs": [self._entry(token, logprob) for token, logprob in noted.top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.bytes_of(token)
        return {"token": shown(data), "logprob": logprob, "bytes": list(data)}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of one choice, one after another; None of none."""
    if not parts:
        return None
    return {key: [one for part in parts for one in part[key]] for key in parts[0]}

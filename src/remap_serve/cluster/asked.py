# SPDX-License-Identifier: Apache-2.0
"""The answer that a body asks for, and its form: OpenAI's objects and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from remap_serve.engine.request import Request

__all__ = ["AnswerAsked", "AnswerPiece"]


class AnswerPiece(NamedTuple):
    """A part of a choice. reason: None unless it is the last. logprobs: as OpenAI writes them; None if not asked for. logprob: of
    its tokens together, 0 unless they were noted."""

    choice: int
    text: str
    tokens: list[int]
    reason: str | None
    logprobs: dict[str, Any] | None = None
    logprob: float = 0.0


@dataclass(frozen=True)
class AnswerAsked:
    """id: of the answer. requests: of the engine, one for each try, those of one prompt together. n: choices of each prompt, the
    likeliest of its `tries`. echoes: the text that each prompt's choices begin with. logprobs: whether the answer has any.
    echo_only: it has no tokens, and ends with the echo. prompt_ids: whether it says the prompts' tokens, where vLLM does: with a
    choice, of a chat beside its choices; in a stream with the first part of each."""

    id: str
    requests: tuple[Request, ...]
    n: int
    tries: int
    echoes: tuple[str, ...]
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    chat: bool
    model: str
    created: int
    logprobs: bool = False
    echo_only: bool = False
    prompt_ids: bool = False

    @property
    def request(self) -> Request:
        """That of the first choice."""
        return self.requests[0]

    def echo(self, number: int) -> str:
        """The text that this try begins with."""
        return self.echoes[number // self.tries]

    def answer(self, tried: Sequence[AnswerPiece]) -> dict[str, Any]:
        """The whole answer, of all tries, each as one piece."""
        made: list[dict[str, Any]] = []
        for first in range(0, len(tried), self.tries):
            found = tried[first : first + self.tries]
            if self.tries > self.n:  # the likeliest for each token; of equal ones the first
                found = sorted(found, key=lambda piece: -piece.logprob / max(1, len(piece.tokens)))
            for piece in found[: self.n]:
                message = {"role": "assistant", "content": piece.text}
                key, value = ("message", message) if self.chat else ("text", piece.text)
                made.append(self._choice(len(made), key, value, piece, True))
        usage = self.usage_of(sum(len(piece.tokens) for piece in tried))
        return self._object(made, False) | self._prompt(0, self.chat) | {"usage": usage}

    def chunk(self, piece: AnswerPiece, first: bool) -> dict[str, Any]:
        """A part of a streamed answer. first: of its choice."""
        delta = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        key, value = ("delta", delta) if self.chat else ("text", piece.text)
        choice = self._choice(piece.choice, key, value, piece, first)
        return self._object([choice], True) | self._prompt(0, self.chat and first)

    def last(self, tokens: int) -> dict[str, Any]:
        """The chunk behind all others, with the usage."""
        return self._object([], True) | {"usage": self.usage_of(tokens)}

    def usage_of(self, tokens: int) -> dict[str, int]:
        """How many tokens there were; each prompt counts once, however many choices it has."""
        prompt = sum(len(one.prompt) for one in self.requests[:: self.tries])
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _choice(self, number: int, key: str, value: Any, piece: AnswerPiece, first: bool) -> dict[str, Any]:
        found = {"index": number, key: value, "finish_reason": piece.reason, "logprobs": piece.logprobs}
        return found | {"token_ids": piece.tokens} | self._prompt(piece.choice, first and not self.chat)

    def _prompt(self, tried: int, here: bool) -> dict[str, Any]:
        return {"prompt_token_ids": self.requests[tried].prompt} if here and self.prompt_ids else {}

    def _object(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

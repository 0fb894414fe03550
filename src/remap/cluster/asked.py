"""What a body asks for, and how the answer to it looks: OpenAI's objects and chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from remap.engine.request import Request

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """id: of the answer. requests: of the engine, one for each choice, those of one prompt together. n: choices of each prompt.
    echoes: the text that each prompt's choices begin with."""

    id: str
    requests: tuple[Request, ...]
    n: int
    echoes: tuple[str, ...]
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    chat: bool
    model: str
    created: int

    @property
    def request(self) -> Request:
        """That of the first choice."""
        return self.requests[0]

    def echo(self, choice: int) -> str:
        """The text that this choice begins with."""
        return self.echoes[choice // self.n]

    def answer(self, choices: Iterable[tuple[str, list[int], str]]) -> dict[str, Any]:
        """The whole answer: text, tokens and reason of each choice."""
        made, count = [], 0
        for number, (text, tokens, reason) in enumerate(choices):
            key, value = ("message", {"role": "assistant", "content": text}) if self.chat else ("text", text)
            made.append(self._choice(number, key, value, tokens, reason))
            count += len(tokens)
        return self._object(made, False) | {"usage": self.usage_of(count)}

    def chunk(self, choice: int, text: str, tokens: list[int], reason: str | None, first: bool) -> dict[str, Any]:
        """A part of a streamed answer. first: of this choice."""
        delta = ({"role": "assistant"} if first else {}) | {"content": text}
        key, value = ("delta", delta) if self.chat else ("text", text)
        return self._object([self._choice(choice, key, value, tokens, reason)], True)

    def last(self, tokens: int) -> dict[str, Any]:
        """The chunk behind all others, with the usage."""
        return self._object([], True) | {"usage": self.usage_of(tokens)}

    def usage_of(self, tokens: int) -> dict[str, int]:
        """How many tokens there were; each prompt counts once, however many choices it has."""
        prompt = sum(len(one.prompt) for one in self.requests[:: self.n])
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}

    def _choice(self, number: int, key: str, value: Any, tokens: list[int], reason: str | None) -> dict[str, Any]:
        return {"index": number, key: value, "finish_reason": reason, "logprobs": None, "token_ids": tokens}

    def _object(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

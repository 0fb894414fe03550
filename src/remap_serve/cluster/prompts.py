# SPDX-License-Identifier: Apache-2.0
"""Prompts of bodies into token ids. A prompt that cannot be served is refused before it is tokenised, which can take a time that
grows with the square of the length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any

from remap.errors import InvalidArgument

from .http_errors import UnknownModel
from .limits import longest_token
from .vocabulary import Vocabulary

__all__ = ["Catalog", "Served", "Wanted", "always", "encoded", "ids_of", "refused", "still"]

Wanted = Callable[[], bool]
"""Whether a caller waits for the text that is being read."""


@dataclass(frozen=True)
class Served:
    """The model: its name, its tokenizer (None: prompts are token ids), tokens of a prompt with its answer at most, and the ids
    that end an answer. created: in seconds since 1970. grammars: whether its engine takes `SamplingParams.json_schema`."""

    name: str
    tokenizer: Any
    positions: int
    stop_token_ids: frozenset[int] = frozenset()
    created: int = field(default_factory=lambda: int(time()))
    grammars: bool = False

    @property
    def models(self) -> tuple[Served, ...]:
        """As `Catalog.models`."""
        return (self,)

    def find(self, name: str | None) -> Served:
        """The model that a body names, or leaves unsaid. Raises UnknownModel (fields model, served) for another one."""
        if name not in (None, self.name):
            raise UnknownModel(
                f"model {name!r} is not served here; nothing was asked; ask for {self.name!r}",
                model=name,
                served=self.name,
            )
        return self

    def settle(self) -> bool:
        """Before several threads read: what the tokenizer sets in its first call (no truncation, no padding), which no other call
        may meet, and what is looked up once. Returns whether it bears several threads."""
        if self.tokenizer is not None:
            self.tokenizer.encode("a", add_special_tokens=False)
            _ = self.most_bytes
        return self.tokenizer is None or bool(getattr(self.tokenizer, "is_fast", False))

    @cached_property
    def most_bytes(self) -> int:
        """A prompt of more bytes of text has more tokens than there are positions."""
        return self.positions * longest_token(self.tokenizer)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The texts of its tokens; for one thread."""
        return Vocabulary(self.tokenizer)


class Catalog:
    """Several models, of which each body has to name one."""

    def __init__(self, models: Sequence[Served]) -> None:
        self.models = tuple(models)
        self._found = {each.name: each for each in models}

    def find(self, name: str | None) -> Served:
        """As `Served.find`."""
        found = self._found.get(name) if name is not None else None
        if found is None:
            asked = "no model is named" if name is None else f"model {name!r} is not served here"
            names = tuple(self._found)
            raise UnknownModel(
                f"{asked}; nothing was asked; ask for one of {', '.join(names)}", model=name, served=names
            )
        return found


def always() -> bool:
    """A caller waits."""
    return True


def still(wanted: Wanted) -> None:
    """Raises CancelledError if no caller waits."""
    if not wanted():
        raise CancelledError


def ids_of(name: str, prompt: str | Sequence[Any], served: Served, special: bool = True) -> tuple[int, ...]:
    """One prompt, a text or token ids. Raises InvalidArgument (field param)."""
    if isinstance(prompt, str):
        return encoded(name, prompt, served, special)
    if len(prompt) > served.positions:
        raise refused(name, f"must have at most {served.positions} tokens, with its answer, got {len(prompt)}")
    ids = tuple(token for token in prompt if isinstance(token, int))
    if len(ids) != len(prompt) or not ids:
        raise refused(name, "must be a text, or a list of one or more token ids, or a list of such")
    return ids


def encoded(name: str, text: str, served: Served, special: bool = True) -> tuple[int, ...]:
    """The text's tokens. special: with those that the tokenizer adds. Raises InvalidArgument (field param)."""
    if served.tokenizer is None:
        raise refused(name, "must be token ids: the model has no tokenizer")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > served.most_bytes:
        raise refused(
            name, f"has {size} bytes of text, and {served.positions} tokens are at most {served.most_bytes} bytes"
        )
    ids = tuple(served.tokenizer.encode(text, add_special_tokens=special))
    if not ids:
        raise refused(name, "must have at least one token, and has none")
    return ids


def refused(name: str, why: str) -> InvalidArgument:
    """Of this field of the body."""
    return InvalidArgument(f"{name} {why}; nothing was asked", param=name)

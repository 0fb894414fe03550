# SPDX-License-Identifier: Apache-2.0
"""The server's limits for callers: bytes of a body, requests at once. Both are checked before a body is read or parsed.

A body is counted as it comes, so the limit holds for one without Content-Length too. A request counts from its first byte until
its answer has been sent, or its caller has gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from remap.errors import Error, InvalidArgument

__all__ = ["Admission", "Busy", "FrontLimits", "TooLarge", "longest_token", "read_body"]


class TooLarge(Error):
    """A body has more bytes than the server reads. Nothing was asked. Fields: maximum, got (bytes that are known of; None: more
    than the maximum came)."""


class Busy(Error):
    """Too many requests are open: no other one is taken. Nothing was asked. Fields: open, maximum, retry_after_s."""


@dataclass(frozen=True)
class FrontLimits:
    """body_bytes: of one body. requests: open at once, of all callers together. retry_after_s: told to a caller that comes
    when there are as many. deadline_s: from the first byte of a request to the last of its answer.

    Raises InvalidArgument (with a field for each) unless each is at least 1, and the deadline above 0.
    """

    body_bytes: int = 4 << 20
    requests: int = 512
    retry_after_s: int = 1
    deadline_s: float = 3600.0

    def __post_init__(self) -> None:
        if min(self.body_bytes, self.requests, self.retry_after_s) < 1 or not self.deadline_s > 0:
            raise InvalidArgument(
                f"limits must be at least 1, got {self.body_bytes} bytes, {self.requests} requests, {self.retry_after_s} s and "
                f"a deadline of {self.deadline_s} s; nothing was created",
                body_bytes=self.body_bytes,
                requests=self.requests,
                retry_after_s=self.retry_after_s,
                deadline_s=self.deadline_s,
            )


class Admission:
    """The open requests. Not thread-safe: one event loop owns it."""

    def __init__(self, limits: FrontLimits) -> None:
        self.limits = limits
        self.open = 0

    def enter(self, count: int = 1) -> Callable[[], None]:
        """Count `count` requests more, and return what ends them; a second call of that does nothing. Raises Busy, with nothing
        changed."""
        if count > self.limits.requests - self.open and count:
            raise Busy(
                f"{self.open} requests are open, and no more are taken; nothing was asked; ask again in "
                f"{self.limits.retry_after_s} s",
                open=self.open,
                maximum=self.limits.requests,
                retry_after_s=self.limits.retry_after_s,
            )
        self.open += count
        left = count

        def leave() -> None:
            nonlocal left
            self.open -= left
            left = 0

        return leave


async def read_body(parts: AsyncIterator[bytes], announced: str | None, maximum: int) -> bytes:
    """The body. announced: its Content-Length, if it has one. Raises TooLarge as soon as it is known to be."""
    if announced is not None and announced.isdecimal() and int(announced) > maximum:
        raise _too_large(maximum, int(announced))
    body = bytearray()
    async for part in parts:
        if len(body) + len(part) > maximum:
            raise _too_large(maximum, None)
        body += part
    return bytes(body)


def longest_token(tokenizer: Any) -> int:
    """Bytes of text that one token stands for, at most.

    A vocabulary writes a byte of text with one character or more, so a token's own UTF-8 length is no less than that. Only
    a normalizer that shortens text, or an unknown word of any length, could make one stand for more.
    """
    return max(len(token.encode("utf-8", "surrogatepass")) for token in tokenizer.get_vocab())


def _too_large(maximum: int, got: int | None) -> TooLarge:
    found = "more" if got is None else got
    return TooLarge(
        f"a body has at most {maximum} bytes here, got {found}; nothing was asked; send less, or serve with a higher --max-body",
        maximum=maximum,
        got=got,
    )

# SPDX-License-Identifier: Apache-2.0
"""The server's limits for callers: bytes of a body and time for it, requests at once. All hold before a body is parsed.

A body is counted as it comes, so the limit holds for one without Content-Length too. A request counts from the last byte of its
body until its answer has been sent, or its caller has gone: one whose body does not come takes no other's place. Bodies that are
still coming have bounds of their own, in time and, all together, in bytes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from remap.errors import Error, InvalidArgument

__all__ = ["Admission", "Busy", "FrontLimits", "TooLarge", "longest_token"]


class TooLarge(Error):
    """A body has more bytes than the server reads. Nothing was asked. Fields: maximum, got (bytes that are known of; None: more
    than the maximum came)."""


class Busy(Error):
    """Too many requests are open: no other one is taken. Nothing was asked. Fields: open, maximum, retry_after_s."""


@dataclass(frozen=True)
class FrontLimits:
    """body_bytes: of one body. requests: open at once, of all callers together. retry_after_s: told to a caller that comes
    when there are as many. deadline_s: from the first byte of a request to the last of its answer. body_s: to the last of its
    body.

    Raises InvalidArgument (with a field for each) unless each is at least 1, and the deadline above 0.
    """

    body_bytes: int = 4 << 20
    requests: int = 512
    retry_after_s: int = 1
    deadline_s: float = 3600.0
    body_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.body_bytes, self.requests, self.retry_after_s) < 1 or not min(self.deadline_s, self.body_s) > 0:
            raise InvalidArgument(
                f"limits must be at least 1, got {self.body_bytes} bytes, {self.requests} requests, {self.retry_after_s} s and "
                f"deadlines of {self.deadline_s} s and {self.body_s} s; nothing was created",
                body_bytes=self.body_bytes,
                requests=self.requests,
                retry_after_s=self.retry_after_s,
                deadline_s=self.deadline_s,
                body_s=self.body_s,
            )


class Admission:
    """The open requests. Not thread-safe: one event loop owns it."""

    def __init__(self, limits: FrontLimits) -> None:
        self.limits = limits
        self.open = 0
        self.coming = 0
        """Bytes of bodies that have not come whole."""

    def enter(self, count: int = 1) -> Callable[[], None]:
        """Count `count` requests more, and return what ends them; a second call of that does nothing. Raises Busy, with nothing
        changed."""
        self._require(not count or count <= self.limits.requests - self.open)
        self.open += count
        left = count

        def leave() -> None:
            nonlocal left
            self.open -= left
            left = 0

        return leave

    async def read(self, parts: AsyncIterator[bytes], announced: str | None) -> bytes:
        """The body. announced: its Content-Length, if it has one. Raises TooLarge as soon as it is known to be; and Busy, with
        nothing read, while no request more is taken, or where all that comes is more than all open requests may have."""
        limits = self.limits
        if announced is not None and announced.isdecimal() and int(announced) > limits.body_bytes:
            raise _too_large(limits.body_bytes, int(announced))
        self.enter()()
        body = bytearray()
        try:
            async for part in parts:
                if len(body) + len(part) > limits.body_bytes:
                    raise _too_large(limits.body_bytes, None)
                self._require(self.coming + len(part) <= limits.requests * limits.body_bytes)
                self.coming += len(part)
                body += part
            return bytes(body)
        finally:
            self.coming -= len(body)

    def _require(self, room: bool) -> None:
        if not room:
            raise Busy(
                f"{self.open} requests are open, {self.coming} bytes of others are coming, and no more are taken; nothing was "
                f"asked; ask again in {self.limits.retry_after_s} s",
                open=self.open,
                maximum=self.limits.requests,
                retry_after_s=self.limits.retry_after_s,
            )


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

# SPDX-License-Identifier: Apache-2.0
"""The texts of single tokens of a model: their bytes, whatever the rest of the text.

A token may be a part of a character, and tokenizers show such a part as U+FFFD. Its bytes are in how the vocabulary writes it:
byte-level BPE (GPT-2, OPT, Qwen, Llama 3) writes each byte as one character, SentencePiece with byte fallback as `<0xE2>`.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["Vocabulary", "shown"]

UNFINISHED = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

# Byte-level BPE writes printable bytes as themselves in Latin-1, and the others as the characters from 256 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if chr(byte) not in _BYTES)}


class Vocabulary:
    """Of a tokenizer; None: tokens have no text, and are shown by their number. One thread owns it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        # Behind another token a space at a token's front is there, which some tokenizers leave out where a text begins.
        self._before: list[int] = [] if tokenizer is None else tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._text(self._before))
        self._special = frozenset(() if tokenizer is None else tokenizer.all_special_ids)

    def bytes_of(self, token: int) -> bytes:
        """Special tokens are their names; tokens that the tokenizer does not have are b""."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def in_text(self, token: int, first: bool) -> bytes:
        """Its part in an answer's text: of special tokens nothing. first: the text begins with it."""
        if token in self._special or self._tokenizer is None:
            return b""
        found = self.bytes_of(token)
        return found[1:] if first and found[:1] == b" " and not self._text([token]).startswith(" ") else found

    def _read(self, token: int) -> bytes:
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the model has more tokens than the tokenizer
            return b""
        text = self._text([*self._before, token])[self._skipped :]
        if UNFINISHED not in text:
            return text.encode("utf-8", "surrogatepass")
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return bytes(_BYTES[each] for each in piece) if _BYTES.keys() >= set(piece) else text.encode()

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def shown(data: bytes) -> str:
    """A token's bytes as OpenAI shows them where one text is asked for: a part of a character as `bytes:\\xe2\\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

# SPDX-License-Identifier: Apache-2.0
"""/tokenize, as vLLM has it: the tokens of a prompt, or of a chat as the model's template writes it."""

from __future__ import annotations

from typing import Any

import msgspec

from remap.errors import InvalidArgument

from .openai import decoded, messages_text
from .prompts import Catalog, Served, Wanted, always, encoded, refused, still

__all__ = ["tokenize"]


class _Body(msgspec.Struct, kw_only=True):
    """A prompt, or messages. add_special_tokens: by itself with a prompt, and not with messages, whose template has them.
    chat_template_kwargs: of that."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


_BODY = msgspec.json.Decoder(_Body)  # made by one thread: see `openai`


def tokenize(text: bytes, served: Served | Catalog, wanted: Wanted = always) -> dict[str, Any]:
    """The answer to this body. Raises InvalidArgument (field param, where a field is at fault) and UnknownModel."""
    body = decoded(text, _BODY)
    served = served.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("either prompt or messages must be given; nothing was asked", param="prompt")
    still(wanted)
    name, asked = ("prompt", body.prompt)
    special = body.add_special_tokens is not False
    if body.messages is not None:
        variables, generates = body.chat_template_kwargs or {}, body.add_generation_prompt
        name, asked = "messages", messages_text(body.messages, served, variables, generates)
        special = bool(body.add_special_tokens)
    if not asked:
        raise refused(name, "must have at least one token, and has none")
    ids = encoded(name, asked, served, special)
    return {"tokens": ids, "count": len(ids), "max_model_len": served.positions}

# SPDX-License-Identifier: Apache-2.0
"""The demo's prompts as the engine's requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .demo_prompts import PROMPTS

if TYPE_CHECKING:
    from remap_serve.engine import Request

__all__ = ["make_requests"]


def make_requests(tokenizer: Any, count: int, stop: frozenset[int]) -> list[Request]:
    """The first `count` prompts in the model's chat template, all arriving at once, decoded greedily."""
    from remap_serve.engine import Request, SamplingParams

    requests = []
    for index, prompt in enumerate(PROMPTS[:count]):
        chat = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        sampling = SamplingParams(max_tokens=prompt.max_tokens, stop_token_ids=stop)
        requests.append(Request(f"{index:02d}-{prompt.kind}", tuple(ids), sampling))
    return requests

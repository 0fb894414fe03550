# SPDX-License-Identifier: Apache-2.0
"""The reference engine's choice of tokens as a logits processor of vLLM's.

vLLM draws from a generator that knows how many draws there were, and counts penalties from where a request began. Here a request
that starts again behind its tokens, in another process, goes on as it would have: the choice is a function of the request, its
tokens and the logits (`remap_serve.engine.sampling`). The processor makes it, and leaves vLLM that one token.

A request whose answer follows a grammar starts again at its prompt, since the grammar's state is that of all tokens of its
answer; then the tokens that it had are chosen again, one by one (`given`).

The processor lives in the process that computes, which no process ends when the instance's own is killed. So it ends itself then.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from remap_serve.engine.request import SamplingParams
from remap_serve.engine.sampling import changed_logits, scores

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OWNER", "PROCESSOR", "ChosenTokens", "chosen_by_us"]

PROCESSOR = "remap_serve.cluster.vllm_sampling:ChosenTokens"
"""For --logits-processors."""

OWNER = "REMAP_VLLM_OWNER"
"""The environment variable with the process id of the instance."""

KEY = "remap"


def chosen_by_us(sampling: SamplingParams, prompt_tokens: int, given: Sequence[int]) -> dict[str, Any] | None:
    """`extra_args` of vLLM's SamplingParams for this request; None where vLLM's greedy choice is ours. prompt_tokens: of the
    caller's prompt, which vLLM's prompt may go beyond. given: tokens that the answer has to begin with."""
    if sampling.temperature == 0 and not sampling.changes_logits and not given:
        return None
    fields = asdict(sampling) | {"stop_token_ids": []}
    return {KEY: {"sampling": fields, "prompt_tokens": prompt_tokens, "given": list(given)}}


@dataclass(eq=False)
class _Row:
    """A request in the batch. known, made: the tokens of vLLM's prompt, and those that came after; vLLM adds to the latter."""

    sampling: SamplingParams
    prompt_tokens: int
    given: list[int]
    known: list[int]
    made: list[int]

    def choose(self, logits: torch.Tensor) -> int:
        if len(self.made) < len(self.given):
            return self.given[len(self.made)]
        tokens = self.known + self.made
        if self.sampling.changes_logits:
            logits = changed_logits(logits, self.sampling, tokens, self.prompt_tokens)
        return int(scores(logits, self.sampling, len(tokens)).argmax())


class ChosenTokens(LogitsProcessor):
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        if OWNER in os.environ:
            _end_with(int(os.environ[OWNER]))

    def is_argmax_invariant(self) -> bool:
        """It is not: it decides."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """The batch has changed."""
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave one token to each request that is not plainly greedy."""
        for index, row in self._rows.items():
            token = row.choose(logits[index])
            logits[index] = -torch.inf
            logits[index, token] = 0.0
        return logits


def _row(params: Any, prompt: list[int] | None, made: list[int]) -> _Row | None:
    asked = (params.extra_args or {}).get(KEY)
    if asked is None:
        return None
    fields = asked["sampling"] | {"logit_bias": tuple(map(tuple, asked["sampling"]["logit_bias"]))}
    return _Row(SamplingParams(**fields), asked["prompt_tokens"], asked["given"], prompt or [], made)


def _end_with(owner: int) -> None:
    """Kill this process when that one has ended."""
    try:
        other = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        select.select([other], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="remap owner", daemon=True).start()

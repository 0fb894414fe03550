# SPDX-License-Identifier: Apache-2.0
"""The part of a sequence that one pass computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remap_serve.engine.request import Sequence

__all__ = ["Chunk"]


# Neither frozen nor compared by value: a pass makes one for every sequence that decodes, and simulations make millions.
@dataclass(eq=False, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in this pass. Their blocks are allocated."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def samples(self) -> bool:
        """The last token known is in this pass, so the pass yields the next one."""
        return self.end == self.sequence.length

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt's tokens behind some of these were asked for, and are not computed yet."""
        sequence = self.sequence
        unanswered = sequence.length == sequence.prompt_tokens and self.start < sequence.prompt_tokens - 1
        return sequence.sampling.prompt_logprobs and unanswered

    @property
    def decodes(self) -> bool:
        """One token beyond the prompt. The last token of a prompt is prefill even if it is alone, wherever the prompt was
        cut."""
        return self.count == 1 and self.start >= self.sequence.prompt_tokens

    @property
    def recomputed(self) -> int:
        return max(0, min(self.end, self.sequence.high_water) - self.start)

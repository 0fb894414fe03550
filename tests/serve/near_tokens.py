"""Tokens of one run against those of another that computed them in other batches.

A row of a matrix product may round otherwise with another number of rows (with which numbers, depends on the processor). So two
right runs may choose different tokens where two are equally good, and go on from there with different texts. Where both
sides compute the same shapes, as with and without remap, compare with plain tokens instead.
"""

from __future__ import annotations

import torch

from remap_serve.engine.sampling import changed_logits, scores

# How far apart the `scores` of two tokens may be where runs disagree, in tests' models of a few narrow layers.
MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.25}


class Near(tuple):
    """The tokens that a request got. Equal to another sequence of tokens if all are the same; or if the first two that differ
    are as good, within MARGIN, after the same tokens, by transformers' own forward. What follows them are different texts,
    which are not compared. `near[:count]` is such a sequence too.
    """

    __hash__ = None

    def __new__(cls, model, request, tokens):
        self = super().__new__(cls, tokens)
        self.model, self.request = model, request
        return self

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Near(self.model, self.request, found) if isinstance(index, slice) and not index.start else found

    def __eq__(self, other):
        for place, (mine, theirs) in enumerate(zip(self, other, strict=False)):
            if mine != theirs:
                known = [*self.request.prompt, *self[:place]]
                asked, logits = self.request.sampling, logits_after(self.model, known)
                if asked.changes_logits:
                    logits = changed_logits(logits, asked, known, len(self.request.prompt))
                found = scores(logits, asked, len(known))
                return abs(float(found[mine] - found[theirs])) <= MARGIN[self.model.dtype]
        return len(self) == len(other)

    def __ne__(self, other):
        return not self == other


@torch.no_grad()
def logits_after(model, tokens):
    """The next token's, (vocabulary,), float32, by transformers without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def near_tokens(model, requests, outputs):
    """`Near` by request, of an engine's result's outputs."""
    return {one.id: Near(model, one, outputs[one.id].tokens) for one in requests}

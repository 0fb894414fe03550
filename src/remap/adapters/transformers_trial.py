"""One trial of an untested version of transformers before the first request: names alone do not show what calls mean.

It generates a few tokens with a cache of ours and compares the logits with those of one pass without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remap.errors import InvalidState

from .paged_cache import PagedCache

__all__ = ["try_once"]

PROMPT, NEW = 3, 3  # tokens
# Of the largest logit. The two sides compute the same numbers in other shapes; without its cache a pass is off by about as much.
TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}
COARSE = 0.1


def try_once(model: Any, cache: Callable[[], PagedCache], name: str, implicit: bool, version: str, tested: str) -> None:
    """Generate `NEW` tokens on an attached model. cache: makes a cache of ours; name: the argument that takes it.

    implicit: whether `generate` without a cache has to use one of ours by itself. Raises InvalidState (fields version, tested,
    difference: of the largest logit, None if a call failed) if it fails, uses another cache, or computes something else.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False  # with dropout no two passes are alike
        with torch.no_grad():
            difference, bound = _difference(model, cache, name, implicit)
    except Exception as error:  # of a version that nobody knows: whatever it raises is the answer
        raise _refusal(f"a trial failed with {type(error).__name__}: {error}", version, tested, None) from error
    finally:
        for module, mode in modes:
            module.training = mode
    if not difference <= bound:
        said = f"a trial gave other logits than one pass without a cache, by {difference:.2g} of the largest"
        raise _refusal(said, version, tested, difference)


def _difference(model: Any, cache: Callable[[], PagedCache], name: str, implicit: bool) -> tuple[float, float]:
    """How far the logits are apart, as a share of the largest, and how far they may be."""
    ids = torch.arange(1, PROMPT + 1, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    if callable(getattr(model, "generate", None)):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
            **({} if implicit else {name: cache()}),
        )
        if not any(isinstance(value, PagedCache) and value.get_seq_length() for value in out.values()):
            raise InvalidState("generate() did not use the cache of remap; nothing was kept")
        ids, found = out.sequences[:, :-1], torch.stack(out.logits, 1)
    else:  # a model without a head
        held = cache()
        found = torch.cat([model(part, **{name: held})[0] for part in (ids[:, :-1], ids[:, -1:])], 1)
    expected = model(input_ids=ids, use_cache=False)[0][:, -found.shape[1] :]
    largest = float(expected.float().abs().max())
    apart = float((found.float() - expected.float()).abs().max())
    return apart / largest if largest else apart, TOLERANCE.get(expected.dtype, COARSE)


def _refusal(said: str, version: str, tested: str, difference: float | None) -> InvalidState:
    return InvalidState(
        f"remap was tested with transformers {tested}; with {version}, {said}; nothing was attached; install "
        f"transformers=={tested.rpartition(' ')[2]}.*",
        version=version,
        tested=tested,
        difference=difference,
    )

# SPDX-License-Identifier: Apache-2.0
"""The models of `remap serve-many`: each a tenant of one session, without pages until its first request if memory is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import remap
from remap.errors import InvalidArgument
from remap.model.footprint import footprint
from remap.sizes import show_size
from remap_serve.engine import LLMEngine, SharedEngines

from .served_model import layout_of, load, shapes, weights_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelPlan", "make_many", "plan_many"]

MIN_BLOCKS = 4
"""KV blocks that a model has whenever it is active."""


@dataclass(frozen=True)
class ModelPlan:
    """folder: of its files, or a hub's name. weights: bytes of its pages. positions: tokens of a prompt with its answer."""

    folder: str
    weights: int
    spec: remap.KVSpec
    positions: int


def plan_many(
    folders: Mapping[str, str], memory: int, device: str = "cpu", page_bytes: int | None = None
) -> tuple[dict[str, ModelPlan], int]:
    """(what each model of these takes, bytes of a page). Reads shapes only.

    Raises InvalidArgument as `served_model.layout_of` does, and (fields field, value, minimum, model) for a memory that does not
    hold the largest of them with its first KV blocks.
    """
    made = {name: shapes(folder) for name, folder in folders.items()}
    sizes = {name: footprint(model, None, embedding_part=True) for name, model in made.items()}
    page = page_bytes or min(size.page_size(device) for size in sizes.values())
    plans = {}
    for name, model in made.items():
        layout = layout_of(model, None)
        blocks = max(MIN_BLOCKS, memory // layout.spec.block_bytes + 1)
        spec = replace(layout.spec, min_blocks=MIN_BLOCKS, max_blocks=blocks, host_blocks=None)
        plans[name] = ModelPlan(folders[name], sizes[name].pages(page) * page, spec, layout.positions)
    # Each model keeps its buffers, and a page that shows while its layers have none.
    kept = sum((-(-size.rest_bytes // page) + 1) * page for size in sizes.values())
    least = {name: kept + _least(plan, page) for name, plan in plans.items()}
    largest = max(least, key=lambda name: least[name])
    if memory < least[largest]:
        raise InvalidArgument(
            f"memory: {largest} needs {show_size(least[largest])} in its turn, for its weights and {MIN_BLOCKS} KV blocks, "
            f"got {show_size(memory)}; nothing was started; give more",
            field="memory",
            value=memory,
            minimum=least[largest],
            model=largest,
        )
    return plans, page


def _least(plan: ModelPlan, page_bytes: int) -> int:
    """Bytes of its weights, of its first blocks, which may straddle pages, and of two pages more."""
    return plan.weights + (-(-plan.spec.min_blocks * plan.spec.block_bytes // page_bytes) + 2) * page_bytes


def make_many(
    plans: Mapping[str, ModelPlan],
    session: remap.Session,
    config: remap.Config | None = None,
    max_num_seqs: int = 32,
    max_batch_tokens: int = 512,
    quantum_s: float = 1.0,
) -> SharedEngines:
    """The session's engines, in turns of `quantum_s`.

    Models are loaded one after another, so host memory never holds two copies of more than one.

    Raises what `served_model.load` and `Session.attach` raise; the session keeps the models that were attached before.
    """
    engines: dict[str, LLMEngine] = {}
    for name, plan in plans.items():
        model: nn.Module = load(plan.folder)
        options: dict[str, Any] = {
            "weights": weights_of(plan.folder),
            "hooks": False,
            "active": False,
            "pages": "none" if session.broker else "auto",  # others may serve with what this one has no request for
            "config": config,
        }
        tenant = session.attach(model, name=name, kv=plan.spec, **options)
        engines[name] = LLMEngine(
            model, tenant, session=session, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens
        )
    return SharedEngines(session, engines, quantum_s=quantum_s)

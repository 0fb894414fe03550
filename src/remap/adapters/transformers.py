# SPDX-License-Identifier: Apache-2.0
"""`remap.attach`: weights and KV cache of a transformers model share one arena, and plain `generate()` uses it.

    with remap.attach(model, capacity="600MiB") as attached:
        out = model.generate(**inputs, max_new_tokens=200)

Every call of the model is a pass. Before it the cache reports how many blocks the new tokens take, and `session.step`
decides which layers give their memory for them. After tokens are dropped, the next passes (or `attached.step()`) bring
layers home.

`attach` replaces two attributes of the instance. Its `forward` makes room for a pass's tokens before the pass
(`Session.attach` makes each call a pass). Its `_prepare_cache_for_generation`, where transformers makes a DynamicCache
for calls of `generate()` without a cache, puts a cache of ours in its place. The latter is not a public name:
`attach(implicit=False)` does not replace it, and `cache=attached.cache()` passes a cache explicitly.
`generate_batch` has a paged cache of its own: see `continuous_batching`.

transformers calls the argument `cache` since 5.24, and called it `past_key_values` before. The adapter finds a cache by
its type and uses neither name.

Two things need memory outside of the arena: activations, and one workspace of one layer's keys and values of the
longest batch.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from remap.config import Config, Knobs
from remap.errors import InvalidArgument, InvalidState, OutOfBlocks
from remap.internals import internals
from remap.joined import UNIX
from remap.memory import device as devices
from remap.model.bind import find_layers, resolve_layers
from remap.model.footprint import footprint
from remap.model.hooks import AttachedHooks, call_shape
from remap.policy.views import Demand
from remap.report import StepReport, TenantSnapshot
from remap.session import Session
from remap.tenant import Tenant

from .block_tables import BatchTable, Growth, SharedBlocks
from .kv_of_config import KVShape, caches_of, kv_shape
from .paged_cache import BlockStore, PagedCache
from .touched import Touched, admit, prove
from .trial import differs

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, GenerationConfig

__all__ = ["Attached", "attach"]

# generate() cannot preempt a sequence, so it prefers a slower pass to none.
_PATIENT = Knobs(slowdown=100.0)
_PATIENT_S, _AGAIN_S = 10.0, 0.02  # how long, and how often, it asks for what other processes give
_LEAST = 2  # blocks: the padding of generate_batch takes them
_FACTORY = "_prepare_cache_for_generation"

TESTED = ("5.19", "5.24")
TOUCHED = (
    Touched("transformers.cache_utils", "Cache.__init__", "self layers="),
    Touched("transformers.cache_utils", "CacheLayerMixin.update", "self key_states value_states"),
    Touched("transformers.cache_utils", "CacheLayerMixin.get_mask_sizes", "self query_length"),
    Touched("transformers.cache_utils", "CacheLayerMixin.get_seq_length", "self"),
    Touched("transformers.cache_utils", "CacheLayerMixin.get_max_length", "self"),
    Touched("transformers.generation.utils", f"GenerationMixin.{_FACTORY}", "self generation_config model_kwargs *"),
)
"""The names that this package uses in transformers; `attach` checks them if the version is newer than TESTED."""

logger = logging.getLogger("remap.adapters.transformers")


def attach(
    model: Any,
    capacity: int | str | None = None,
    device: str | None = None,
    *,
    session: Session | None = None,
    name: str = "model",
    layers: Any = None,
    block_tokens: int = 16,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    dtype: str | None = None,
    implicit: bool = True,
    config: Config | None = None,
    session_options: Mapping[str, Any] | None = None,
    **attach_options: Any,
) -> Attached:
    """Put a transformers model's weights and KV cache into one arena.

    model: a decoder of transformers, or a peft model around one (with its adapters loaded: adapters that are loaded
    later stay outside of the arena). capacity, device, session_options: of the `Session` that attach makes; or session:
    an open one, for several models. With device "unix:PATH", or REMAP_ARENA=unix:PATH and none of the three, the model
    gets pages of the broker there, and the capacity is the broker's. min_tokens: KV tokens that always have room.
    max_tokens: most KV tokens (they cost addresses, not memory); by default as many as the capacity could hold.
    dtype: of the cache, by default the model's.
    implicit: whether `generate()` without a cache uses one of ours. config: by default one that prefers slow passes to
    refusing tokens, because `generate()` cannot preempt. attach_options: of `Session.attach` (weights, mutable,
    priority, embedding, ...).

    Raises InvalidArgument for a bad option, for a model that does not fit one KVSpec (`kv_of_config`) or for tensors
    that cannot be moved (such as a quantiser's tensor subclasses); InvalidState if the model is attached already, or if
    transformers is of another version than the tested ones and differs from them (fields version,
    tested, and unlike or differed); OutOfMemory (field minimum_bytes). Nothing has changed then. With a version that is
    newer than the tested ones, `attach` generates a few tokens twice (see `trial`).
    """
    otherwise = f"install transformers=={TESTED[-1]}.*"
    admit("transformers", transformers.__version__, TESTED, TOUCHED, logger.warning, otherwise)
    inner = _inner(model)
    if session is None and capacity is None and device is None:
        device = _broker()
    joins = isinstance(device, str) and device.startswith(UNIX)
    if (session is None) == (capacity is None and not joins):
        raise InvalidArgument(
            "attach takes either a capacity or a broker (device='unix:PATH'), to make a session, or an open session; nothing was "
            "attached",
            capacity=capacity,
        )
    if session is not None and (device is not None or session_options):
        raise InvalidArgument("device and session_options do not go with an open session; nothing was attached")
    if any(each.model is inner and not each.closed for peers in _AT.values() for each in peers.values()):
        raise InvalidState("the model is attached already; nothing was attached; close what attach returned first")
    if implicit and not callable(getattr(inner, _FACTORY, None)):
        raise InvalidState(
            f"{type(inner).__name__} has no {_FACTORY}, where generate() makes its cache; nothing was attached; pass "
            "implicit=False, and attached.cache() to generate()",
            missing=_FACTORY,
        )
    caches_of(inner)  # before its layers are looked for: some that cannot be served have none under a usual name
    modules = resolve_layers(inner, _find_layers(inner) if layers is None else layers)
    shape = kv_shape(inner, modules, dtype)
    home = session or _open(inner, modules, capacity, device, session_options or {})
    attached = None
    try:
        one = shape.spec(block_tokens)
        least = max(_LEAST, _blocks("min_tokens", min_tokens, block_tokens))
        most = home.capacity_bytes // one.block_bytes
        if max_tokens is not None:
            most = _blocks("max_tokens", max_tokens, block_tokens)
        spec = replace(one, min_blocks=least, max_blocks=max(least, most))
        tenant = home.attach(inner, list(modules), name=name, kv=spec, config=config or _PATIENT, **attach_options)
        attached = Attached(home, tenant, session is None, inner, shape, implicit)
    finally:
        if attached is None:
            _abandon(home, name, owned=session is None)
    try_out = functools.partial(differs, attached)
    prove("transformers", transformers.__version__, TESTED, try_out, attached.close, otherwise)
    return attached


class Attached:
    """A model in an arena, until `close()` or the end of the `with` block. Call its methods on the model's thread.

    session, tenant: of the model; `session.snapshot()` names the streamed layers. `snapshot` is the tenant's part of
    it.
    """

    def __init__(
        self,
        session: Session,
        tenant: Tenant,
        owned: bool,
        model: Any,
        shape: KVShape,
        implicit: bool,
    ) -> None:
        self.session, self.tenant, self.model = session, tenant, model
        self.name, self.implicit = tenant.name, implicit
        self.blocks = SharedBlocks(tenant.kv)
        self._owned, self.shape = owned, shape
        self._store = BlockStore(self.tenant.kv, shape)
        self._scheduled: tuple[type, ...] = ()  # types of caches whose scheduler makes the step before a pass
        self.makes_caches = True  # whether generate() gets caches of ours
        self.cached_tokens = 0  # positions that passes have written to caches of ours, of one sequence each
        inner = internals(tenant)
        self._hooks = inner.hooks or AttachedHooks(inner)  # they go when the tenant goes, whoever detaches it
        # This wraps the bracket of a pass: a session refuses step() inside of a pass.
        self._hooks.wrap(model, "forward", self._before_pass(model.forward))
        if implicit:
            self._hooks.wrap(model, _FACTORY, self._factory(getattr(model, _FACTORY)))
        _AT.setdefault(session, weakref.WeakValueDictionary())[self.name] = self
        self.closed = False

    def cache(self) -> PagedCache:
        """A new cache for one batch: pass it as `cache` (`past_key_values` before transformers 5.24).

        `reset()` frees its blocks, and so does its end of life.
        """
        self._check_open()
        return PagedCache(self._store, self.blocks.table(), self._room, internals(self.tenant).kv.move)

    def step(self) -> StepReport:
        """One step without a demand, between calls: blocks of caches that are gone become free, and layers may come
        home.

        Every pass does this, too. An idle server calls it from time to time; the controller decides after how many
        steps a layer comes home (its reload has to be paid for first).
        """
        return self._step(0)

    def continuous_batching(self, **options: Any) -> ContinuousBatchingConfig:
        """A configuration for `model.generate_batch(prompts, continuous_batching_config=...)` over this model's blocks.

        options: of `ContinuousBatchingConfig`, such as max_batch_tokens (256 by default). Raises InvalidArgument for
        options that the adapter sets itself, and for models that a paged cache lays out in another way (sliding
        windows, layers that are not alike); `continuous_batching` gives the reasons. Raises InvalidState if this version
        of transformers has another paged cache.
        """
        self._check_open()
        try:
            from . import continuous_batching
        except ImportError as error:
            raise InvalidState(
                "this version of transformers has another paged cache; nothing changed; use generate(), or "
                f"transformers {TESTED[-1]}",
                missing=error.name,
            ) from error
        named = "transformers' continuous batching"
        admit(named, transformers.__version__, TESTED, continuous_batching.TOUCHED, logger.warning, "use generate()")
        self._measure()  # now, because generate_batch replaces the model's attention
        self._scheduled = (continuous_batching.PagedAttentionCache,)
        return continuous_batching.configuration(self, **options)

    def ask(self, blocks: int) -> StepReport:
        """A step with a demand, between passes: for engines that take blocks from `blocks` themselves.

        See `session.step`.
        """
        return self._step(blocks)

    @property
    def snapshot(self) -> TenantSnapshot:
        """The tenant's part of `session.snapshot()`: alpha, streamed layers, blocks, copies, stall."""
        return self.session.snapshot().tenants[self.name]

    def close(self) -> None:
        """Take the hooks out and move the model back to ordinary memory. Do not use its caches afterwards. Idempotent.

        Raises the errors of `Session.detach`; call it again then.
        """
        if self.closed:
            return
        if self._owned:
            self.session.close()
        elif not self.session.closed:
            self.session.detach(self.name)
        self._hooks.remove()
        self._store.close()
        if (batching := sys.modules.get(f"{__package__}.continuous_batching")) is not None:
            batching.withdraw(self)
        if (peers := _AT.get(self.session)) is not None:
            peers.pop(self.name, None)
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise InvalidState("the model was detached already; nothing was made; attach it again", tenant=self.name)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- passes ----------------------------------------------------------------------------------------------------

    def _before_pass(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            if self._hooks.removed:  # others have put a wrapper around this one, and kept it
                return forward(*args, **kwargs)
            given = (*args, *kwargs.values())
            cache = _cache_among(given)
            if cache is None:
                # A call of generate_batch has indexed its blocks by now; our scheduler has made the step.
                if not any(isinstance(value, self._scheduled) for value in given):
                    self._step(0)
                return forward(*args, **kwargs)
            shape = call_shape(args, kwargs)
            if shape is None:
                raise InvalidArgument(
                    "the call has neither input_ids nor inputs_embeds; nothing was computed; pass one of them"
                )
            cache.prepare(*shape)
            completed = False
            try:
                out = forward(*args, **kwargs)
                completed = True
            finally:
                cache.finish(completed)
            self.cached_tokens += shape[1]
            return out

        return prepared

    def _room(self, table: BatchTable, rows: int, tokens: int) -> Growth:
        wanted, kv = table.plan(rows, tokens).blocks, self.tenant.kv
        self._step(wanted)
        if wanted > kv.free_blocks and self._measure():
            self._step(wanted)
        deadline = time.monotonic() + (_PATIENT_S if self.session.broker else 0.0)
        while wanted > kv.free_blocks and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)
            self._step(wanted)
        if wanted > kv.free_blocks:
            stay = tuple(self.tenant.written)
            written = f" (layers {list(stay)} stay: something wrote into them after attach)" if stay else ""
            raise OutOfBlocks(
                f"{rows} sequences with {tokens} more tokens take {wanted} more blocks of {kv.spec.block_tokens} tokens; "
                f"{kv.free_blocks} of {kv.usable_blocks} are free, and no more layers may be given{written}; the cache has not "
                "changed; attach with more capacity, use smaller batches, or let go of other caches",
                requested=wanted,
                free=kv.free_blocks,
                usable=kv.usable_blocks,
                written=stay,
            )
        return table.plan(rows, tokens)  # the same plan, with the ids after the step's moves

    def _measure(self) -> bool:
        """Run a pass of one token if there was no pass yet; returns whether it did.

        Before the controller has seen a pass, it remaps no more than one layer.
        """
        if internals(self.tenant).times() is not None:
            return False
        with torch.no_grad():
            self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.model.device), use_cache=False)
        return True

    def _step(self, blocks: int) -> StepReport:
        peers = dict(_AT.get(self.session, {}))
        for peer in peers.values():
            peer.blocks.collect()
        report = self.session.step({self.name: Demand(blocks)})
        for name, moved in report.moved.items():
            if name in peers:
                peers[name].blocks.relocate(moved)
        return report

    def _factory(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepared(
            generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            if self._hooks.removed:
                return prepare(generation_config, model_kwargs, *args, **kwargs)
            if generation_config.assistant_early_exit is not None:
                raise InvalidArgument(
                    f"assistant_early_exit={generation_config.assistant_early_exit} makes passes through a part of the layers, "
                    f"and the cache of {self.name!r} needs all; nothing was computed; give an assistant_model or "
                    "prompt_lookup_num_tokens instead, or detach the model",
                    tenant=self.name,
                    assistant_early_exit=generation_config.assistant_early_exit,
                )
            given = set(model_kwargs)
            result = prepare(generation_config, model_kwargs, *args, **kwargs)
            if self.makes_caches and generation_config.cache_implementation in (None, "dynamic"):
                for name in model_kwargs.keys() - given:
                    if type(theirs := model_kwargs[name]) is DynamicCache:  # a subclass keeps more than keys and values
                        model_kwargs[name] = ours = self.cache()
                        if any(getattr(layer, "record_past", False) for layer in theirs.layers):
                            ours.activate_past_recording()
            return result

        return prepared


# session -> name -> the attached model: a step may move the blocks of each of them.
_AT: weakref.WeakKeyDictionary[Session, weakref.WeakValueDictionary[str, Attached]] = weakref.WeakKeyDictionary()


def _broker() -> str | None:
    """The broker that REMAP_ARENA names, or REMAP_DEVICE."""
    named = (os.environ.get("REMAP_ARENA", ""), devices.default_name())
    return next((each for each in named if each.startswith(UNIX)), None)


def _open(
    model: Any, layers: Any, capacity: int | str | None, device: str | None, options: Mapping[str, Any]
) -> Session:
    """A session for this model: its page size suits the layers."""
    chosen = dict(options)
    where = device or devices.default_name()
    if where.startswith(UNIX):
        return Session(capacity, device, **chosen)  # with the broker's page size
    if where != "cpu" and getattr(chosen.get("platform"), "backend", None) is None:
        chosen.setdefault("page_bytes", footprint(model, layers).page_size(where))
    return Session(capacity, device, **chosen)


def _abandon(session: Session, name: str, owned: bool) -> None:
    """Undo a failed attach."""
    if owned:
        session.close()
    elif name in session.snapshot().tenants and name not in _AT.get(session, {}):
        session.detach(name)


def _inner(model: Any) -> Any:
    """The transformers model itself: of a peft model, the one inside."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def _find_layers(model: Any) -> str:
    """Under a name that no other model uses (Bert, BioGPT) they are the only list of as many modules as there are layers."""
    try:
        return find_layers(model)
    except InvalidArgument as error:
        lists: Any = error.candidates
        layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
        found = [path for path, modules in lists.items() if modules == layers]
        if len(found) != 1:
            raise
        return found[0]


def _cache_among(values: Iterable[Any]) -> PagedCache | None:
    found = [value for value in values if isinstance(value, PagedCache)]
    if len(found) > 1:
        raise InvalidArgument(
            f"the call has {len(found)} caches of the adapter, under several names; nothing was computed; pass one, "
            "under the name that this version of transformers uses",
            caches=len(found),
        )
    return found[0] if found else None


def _blocks(name: str, tokens: int, block_tokens: int) -> int:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise InvalidArgument(f"{name} must be an int of at least 0, got {tokens!r}; nothing was attached", field=name)
    return -(-tokens // block_tokens)

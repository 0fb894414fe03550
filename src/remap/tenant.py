# SPDX-License-Identifier: Apache-2.0
"""One attached model: its KV cache, and the brackets that the engine puts around passes and layers.

    with tenant.forward():            # one pass
        for i in range(layers):
            tenant.wait(i)            # the layer's bytes are in place
            ...compute...
            tenant.done(i)            # its ring buffer may be overwritten

wait and done are the core's own methods, bound once. For a resident layer each is one atomic load. In a pass that
computes on a stream they make that stream wait; in a pass of the calling thread they block the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn

from remap.config import invalid, is_amount, is_count
from remap.errors import InvalidState
from remap.kv.pool import listed
from remap.kv.public import KVCache
from remap.memory.passes import Passes
from remap.memory.state import TenantState
from remap.moved import moved
from remap.notebook import table
from remap.policy.cost import LayerTimes

if TYPE_CHECKING:
    from remap import _core
    from remap.model.hooks import AttachedHooks

__all__ = ["Internals", "Tenant"]

_PHASES = ("decode", "prefill", "mixed")


def _checked(phase: object, tokens: Any) -> int:
    """tokens as an int. Raises InvalidArgument (fields field, value) for an invalid phase or number of tokens."""
    if not isinstance(phase, str) or phase not in _PHASES:
        raise invalid("phase", phase, f"one of {_PHASES}")
    try:
        count = index(tokens)  # of numpy and torch as well
    except TypeError:
        count = -1
    if count < 0 or isinstance(tokens, bool):
        raise invalid("tokens", tokens, "an int of at least 0")
    return count


def _gone(name: str) -> Callable[..., NoReturn]:
    # Not a method: a tenant that refers to itself would keep its streams until the next garbage collection.
    def refuse(layer: int, stream: int = 0) -> NoReturn:
        raise InvalidState(f"tenant {name!r} was detached, or its session closed; nothing was done", tenant=name)

    return refuse


class _End(partial[None]):
    """Ends a pass when it is called. bracket: lives as long as this does."""

    bracket: _Pass


class _Exit:
    """`_Pass.__exit__`. A `with` statement fetches it before it enters, keeps what it got, and calls that in the end.

    Between the end of the block and the first line of a function that would end the pass, CPython looks for signals: what a
    handler raises there leaves the pass open. No `except` of ours can stand there, and in a `__del__` the exception would be
    lost. So the pass is open only while its bracket lives (`Turn.enter`), and what the statement has got is all that keeps the
    bracket alive: it is gone when the statement has been left, by whichever way. The traceback of such an exception has the
    locals of `Passes.end`, which knows no bracket; `partial`, which calls it, has no frame.
    """

    def __get__(self, bracket: _Pass | None, owner: type[_Pass]) -> Callable[..., None]:
        if bracket is None:  # as `contextlib.ExitStack` asks, which has the bracket itself
            return lambda each, *error: each.__exit__(*error)
        return bracket.ending()


class _Pass:
    """The context manager of `Tenant.forward`. Each pass gets a new one, so it keeps no state between passes."""

    __slots__ = ("__weakref__", "_entered", "_passes", "_phase", "_state", "_stream", "_streamed", "_tokens")

    def __init__(
        self,
        entered: Any,
        passes: Passes,
        state: TenantState,
        phase: str,
        tokens: int,
        stream: Any,
        streamed: Sequence[int],
    ) -> None:
        self._entered = entered
        self._passes = passes
        self._state = state
        self._phase = phase
        self._tokens = tokens
        self._stream = stream
        self._streamed = streamed

    def __enter__(self) -> Any:
        try:
            self._passes.begin(self._state, self._stream, self, self._streamed)
            return self._entered
        except BaseException:  # an interrupt too, as late as when the call has returned: CPython looks within the try
            if self._state.turn.open_pass is self:
                self._passes.close(self._state)
            raise

    def ending(self) -> _End:
        """What ends the pass."""
        end = _End(self._passes.end, self._state, self._phase, self._tokens)
        end.bracket = self
        return end

    __exit__ = _Exit()


class Internals:
    """One attached model as this library's own engines, adapters and tests see it: its measurements, which of its bytes are
    where, its whole KV cache (`kv`), and how its passes begin to wait. `Tenant` has what other engines call. Not a part of the
    API that stays as it is from release to release.

    Only one thread at a time, the engine's, may call `forward`, `wait` and `done`; other threads may call the session meanwhile
    (locking.py).
    """

    def __init__(self, state: TenantState, passes: Passes, session: object) -> None:
        """session: kept alive while the tenant is attached, since passes go on even if nothing else refers to it."""
        self._state = state
        self._passes = passes
        self.session: object = session
        self.number = state.number
        self.name = state.name
        self.priority = state.priority
        self.kv = state.kv
        self.layers = state.layers
        self.layer_bytes = state.layer_bytes[: state.layers]  # not of the embedding part, which never streams
        self.wait: Callable[..., None] = state.prefetcher.wait_call
        self._core_wait = self.wait
        self.done: Callable[..., None] = state.prefetcher.done_call
        self.hooks: AttachedHooks | None = None
        self._first_wait: Any = None
        self._part_wait: Any = None
        self.tenant = Tenant(self)

    def _how(self) -> str:
        return "detached" if self._state.detached else "active" if self._state.active else "inactive"

    def __repr__(self) -> str:
        """Such as <remap.Tenant llama: active, 2 of 8 layers stream, 16 KV blocks usable>. Takes no lock."""
        streams = f"{len(self._state.streamed)} of {self.layers} layers stream"
        return f"<remap.Tenant {self.name}: {self._how()}, {streams}, {self.kv.pool.usable_blocks} KV blocks usable>"

    def _repr_html_(self) -> str:
        """The HTML for a notebook. Takes no lock."""
        state, pool = self._state, self.kv.pool
        rows = (
            ("state", self._how()),
            ("priority", self.priority),
            ("layers", f"{self.layers}, of which {len(state.streamed)} stream"),
            ("KV blocks", f"{pool.usable_blocks} usable, {pool.free_blocks} of them free"),
        )
        return table(f"tenant {self.name}", lambda: rows)

    # -- passes ----------------------------------------------------------------------------------------------------

    def forward(
        self, phase: str = "decode", tokens: int = 1, stream: Any = None, streamed: Sequence[int] = ()
    ) -> _Pass:
        """`Tenant.forward`."""
        return self.bracket(self, phase, tokens, stream, streamed)

    def bracket(self, entered: Any, phase: str, tokens: int, stream: Any, streamed: Sequence[int]) -> _Pass:
        """`Tenant.forward`; entering gives `entered`."""
        if phase not in _PHASES or tokens.__class__ is not int or tokens < 0:
            tokens = _checked(phase, tokens)
        if streamed.__class__ is not tuple and streamed.__class__ is not list:
            streamed = listed(streamed)
        return _Pass(entered, self._passes, self._state, phase, tokens, stream, streamed)

    def expect_whole_pass(self) -> None:
        """Stream no layer until one pass has waited for every layer: it is not known yet whether the new hooks work."""
        unseen = self._state.unseen = set(range(self.layers))
        core = self._state.prefetcher.wait

        # Not a method: a tenant that refers to itself would keep its streams until the next garbage collection.
        def wait(layer: int, stream: int = 0) -> None:
            core(layer, stream)
            unseen.discard(layer)

        self._first_wait = wait
        self._waits_by(wait)

    def whole_pass_seen(self) -> None:
        """A pass has waited for every layer: from now on `wait` is the core's own method."""
        if self.wait is self._first_wait:
            self._waits_by(self._core_wait)

    def compute_parts(self) -> None:
        """Passes may compute a part of the layers from now on: `wait` refuses the others."""
        state, core = self._state, self._state.prefetcher.wait

        # Not a method, as in `expect_whole_pass`. The engine's thread reads `pages` in its passes; a change replaces them
        # outside of passes.
        def wait(layer: int, stream: int = 0) -> None:
            if isinstance(layer, int) and not state.pages.computes(layer):
                raise InvalidState(
                    f"tenant {state.name!r} does not compute layer {layer} now, another instance does; abandon the pass, or "
                    "place its layers anew (advanced.place)",
                    tenant=state.name,
                    layer=layer,
                    elsewhere=tuple(sorted(state.pages.gone)),
                )
            core(layer, stream)

        self._part_wait = wait
        self._waits_by(wait)

    def compute_all(self) -> None:
        """Passes compute all layers again: `wait` is the core's own method."""
        if self.wait is self._part_wait:
            self._waits_by(self._core_wait)

    def retire(self) -> None:
        """The memory goes away. From now on wait and done raise instead of touching it, and no hook calls them."""
        if self.hooks is not None:
            self.hooks.remove()
        self._core_wait = _gone(self.name)
        self._waits_by(self._core_wait, _gone(self.name))
        self.session = None

    def _waits_by(self, wait: Callable[..., None], done: Callable[..., None] | None = None) -> None:
        # The handle has them as attributes of its own, since a property would cost each layer more. Its own first: code that
        # looks at `wait` here whether they were exchanged does so again behind an interrupt.
        for each in (self.tenant, self):
            each.wait = wait
            if done is not None:
                each.done = done

    @property
    def in_pass(self) -> bool:
        """Whether a pass is open."""
        return self._state.turn.open_pass is not None

    @property
    def seen(self) -> bool:
        """Whether its layers may stream: a whole pass has waited for each, or the engine calls wait itself."""
        return self._state.unseen is None

    @property
    def streaming(self) -> bool:
        """Whether wait() has something to do in the next pass: some layer is streamed, loading, or being re-pointed.

        While False, a pass may leave out wait and done, so one CUDA graph may hold all of its layers.
        """
        self._passes.refuse_fork()
        return self._state.streaming

    def ready(self, layer: int) -> bool:
        """Whether `wait` has nothing to wait for: all bytes of the layer are at its address, and it does not stream.
        Raises InvalidState (field tenant) if the tenant was detached, or its session closed."""
        return bool(self._copies().ready(layer))

    def stats(self) -> _core.PrefetchStats:
        """Counts since attach, as of now: passes, copies, copied_bytes, copy_s, misses, stall_s, timed_bytes. Raises
        InvalidState as `ready` does."""
        return self._copies().stats()

    @property
    def shortages(self) -> tuple[int, int]:
        """Steps that met a demand beyond the free blocks, and those that did not meet it whole, since attach."""
        return self._state.shortages_met, self._state.shortages_unmet

    def _copies(self) -> _core.Prefetcher:
        prefetcher = self._state.live_prefetcher
        if prefetcher is None:
            _gone(self.name)(0)
        return prefetcher

    # -- what streams ----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether it may serve passes: see `Session.activate`."""
        return self._state.active

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that are loaded on each pass, ascending."""
        return self._state.streamed

    @property
    def computed(self) -> range:
        """The layers that its passes compute: all, unless `advanced.place` says otherwise."""
        computed = self._state.pages.computed
        return range(self.layers) if computed is None else computed

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """The layers that it does not hold, ascending, since another instance computes them: their pages are KV."""
        return tuple(sorted(self._state.pages.gone - self._state.pages.cold))

    @property
    def cold(self) -> tuple[int, ...]:
        """The layers that have no pages, ascending: activation brings them home (`Session.activate`)."""
        return self._state.cold_layers

    @property
    def buffers(self) -> int:
        """Ring buffers in use (beta); 0 while nothing is streamed."""
        return self._state.buffers

    @property
    def remapped(self) -> float:
        """Layers' worth of pages that are KV now, or lent (the papers' alpha): an int; in slices a fraction."""
        return self._state.reported

    @property
    def lent_pages(self) -> int:
        """Pages of its layers that are free for other tenants, or are their KV."""
        return len(self._state.pages.lent)

    @property
    def targets(self) -> tuple[float | None, float | None]:
        """(`Config.ttft_s`, `Config.tbt_s`) that it was attached with."""
        return self._state.config.ttft_s, self._state.config.tbt_s

    @property
    def away_pages(self) -> int:
        """Pages that its activation has to bring: those that it has lent, and those of its cold layers."""
        state = self._state
        return len(state.pages.lent) + sum(map(state.pages_of, state.pages.cold))

    @property
    def reload_s(self) -> float:
        """Seconds in which the link loads the layers that are away."""
        state = self._state
        away = self.away_pages * state.kv.geometry.page_bytes
        return away * state.timing.copy_seconds() * self.layers / sum(self.layer_bytes) if away else 0.0

    def lends(self, layer: int) -> bool:
        """Whether other tenants have pages of this layer, or may take some, or it waits to come home from them."""
        self._require_layer(layer)
        return self._state.lends(layer)

    @property
    def pinned(self) -> tuple[int, ...]:
        """Layers that may not stream: something wrote into them after attach, or other code changed their weights file or
        registered their memory elsewhere."""
        return tuple(sorted(self._state.pinned))

    @property
    def written(self) -> dict[int, list[str]]:
        """layer -> its tensors, or its weights file, that something wrote to after attach."""
        return {layer: list(paths) for layer, paths in self._state.written.items()}

    # -- its model -------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> tuple[Any, ...]:
        """The layers as torch modules, `extra_layers` last; () if the tenant was attached as bytes."""
        return self._state.source.modules

    def away(self) -> set[int]:
        """The layers of which some bytes are not at their addresses now: streamed, loading, or to be re-pointed."""
        self._passes.refuse_fork()
        return self._state.away()

    def at_home(self, layer: int) -> bool:
        """Whether all bytes of the layer are at its address."""
        self._require_layer(layer)
        return not self._state.detached and layer not in self.away()

    def _require_layer(self, layer: object) -> None:
        if not is_count(layer) or layer not in range(self.layers):
            raise invalid("layer", layer, f"an int in 0..{self.layers - 1}")

    def refuse_lost_writes(self) -> None:
        """Raises InvalidState (fields tenant, written) if something wrote into streamed layers: the write is lost."""
        self._state.refuse_lost_writes()

    # -- times -----------------------------------------------------------------------------------------------------

    def times(self) -> LayerTimes | None:
        """Measured seconds per layer for the shape of the last decode pass; None before the first pass, and while no copy was
        timed."""
        return self._state.timing.decode()

    def prefill_times(self) -> LayerTimes | None:
        """Measured seconds per layer of a short prefill; None before the first pass."""
        return self._state.timing.prefill()

    def copy_seconds(self) -> float:
        """Mean measured seconds to copy in one layer; 0 if the link was not measured."""
        return self._state.timing.copy_seconds()

    def streamed_seconds(self, blocks: int) -> float:
        """Seconds to copy one layer's keys and values of `blocks` streamed blocks in, by measurement; 0 if the link was
        not measured."""
        if not is_count(blocks):
            raise invalid("blocks", blocks, "an int of at least 0")
        return 2.0 * self._state.part_seconds(blocks)

    def calibrate_link(self, bytes_per_s: float) -> None:
        """Set the estimate of the copy bandwidth, in bytes per second; measured copies refine it."""
        if not is_amount(bytes_per_s) or bytes_per_s == 0:
            raise invalid("bytes_per_s", bytes_per_s, "a finite number above 0")
        self._state.timing.calibrate_link(bytes_per_s)


class Tenant:
    """A handle to one attached model, made by `Session.attach`. Only one thread at a time, the engine's, may call
    `forward`, `wait` and `done`; other threads may call the session meanwhile.

    name, priority: as attached. layers: how many it has, `extra_layers` counted. kv: its KV cache. wait(layer, stream=0) and
    done(layer, stream=0): around each layer of a pass (`session.attach(hooks=False)`); for a resident layer one atomic load.
    """

    def __init__(self, internals: Internals) -> None:
        self._internals = internals
        self.name = internals.name
        self.priority = internals.priority
        self.layers = internals.layers
        self.kv = KVCache(internals.kv)
        self.wait = internals.wait
        self.done = internals.done

    def __repr__(self) -> str:
        return repr(self._internals)

    def _repr_html_(self) -> str:
        return self._internals._repr_html_()

    def forward(
        self, phase: str = "decode", tokens: int = 1, stream: Any = None, streamed: Sequence[int] = ()
    ) -> _Pass:
        """Bracket one pass. phase ("prefill", "decode" or "mixed") and tokens (in the batch) sort the time
        measurements.

        stream: the stream that the pass computes on: an object with `__cuda_stream__()`, a torch.cuda.Stream, or a
        handle as an integer. By default it is torch's current stream on a GPU, and the calling thread where the
        processor itself computes. Enqueue all work on this tenant's memory on the stream of its last pass, or order it
        behind that stream. Each pass may use another stream. A stream has to live until the tenant has another one or
        is detached.

        streamed: the blocks of `kv.host.stream` that the pass reads, each once. Every layer of the KV cache must then be waited
        for, and done, one after another.

        Raises InvalidArgument (fields field, value) for another phase, tokens that are no int of at least 0, or blocks that are
        no iterable.

        Entering raises InvalidState if the session is closed, the tenant detached or a pass open already, and (field
        host_blocks) if the bytes of a block of `streamed` never arrived in host memory; InvalidArgument if the stream is
        none of the session's device, or a block of `streamed` shows nothing; and the backend's error if the last change
        could not be finished. Then no pass has begun, and entering again tries again. An exception inside abandons the
        pass: the next one starts afresh.

        Leaving a pass that was not abandoned raises InvalidState if its results must be discarded. The pass has ended
        then. Fields (tenant, layer, layers): it did not wait for layers that were streamed or loading, so its results
        are not known. (tenant, written): the model, or other code since the last pass, wrote into a streamed layer, and
        the write is lost. (file, expected, found): a weights file that layers come from has changed; entering raises
        this as well.
        """
        return self._internals.bracket(self, phase, tokens, stream, streamed)

    @property
    def active(self) -> bool:
        """Whether it may serve passes: see `Session.activate`."""
        return self._internals.active

    @property
    def streaming(self) -> bool:
        """Whether wait() has something to do in the next pass: some layer is streamed, loading, or being re-pointed.

        While False, a pass may leave out wait and done, so one CUDA graph may hold all of its layers.
        """
        return self._internals.streaming

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that are loaded on each pass, ascending."""
        return self._internals.streamed

    @property
    def remapped(self) -> float:
        """Layers' worth of pages that are KV now, or lent (the papers' alpha): an int; in slices a fraction."""
        return self._internals.remapped

    @property
    def written(self) -> dict[int, list[str]]:
        """layer -> its tensors, or its weights file, that something wrote to after attach. Such layers do not stream."""
        return self._internals.written

    def __getattr__(self, name: str) -> Any:
        return moved(self, name, "_internals", "remap.advanced.internals(tenant)")

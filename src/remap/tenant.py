"""One attached model: its layers, its KV cache, and the brackets that the engine puts around passes and layers.

    with tenant.forward():            # one pass
        for i in range(layers):
            tenant.wait(i)            # the layer's bytes are in place
            ...compute...
            tenant.done(i)            # its ring buffer may be overwritten

wait and done are the core's own methods, bound once: for a resident layer they are one atomic load. In a pass that computes
on a stream they make that stream wait; in a pass of the calling thread they block it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from remap.kv.cache import KVCache
from remap.memory.plan import Plan
from remap.memory.slice_plan import alpha_of
from remap.memory.state import Attachment
from remap.policy.cost import CostModel, LayerTimes, Phase, bucket_of
from remap.policy.selection import select

from . import nvtx
from .config import refuse
from .errors import Error, InvalidState
from .locking import Turn

if TYPE_CHECKING:
    from remap.memory.streams import ComputeStream
    from remap.model.hooks import AttachedHooks

    from .session import Session

__all__ = ["Tenant"]

_TIMES_EVERY = 32  # passes for which one estimate is used
_PREPARE_EVERY = 8  # passes at least between two preparations for growth: batches may change their shape in every pass
_UNTIMED = 64  # passes whose times may still come, at most: the prefetcher times no more on a stream


_PHASES = ("decode", "prefill", "mixed")


def _checked(phase: object, tokens: Any) -> int:
    """tokens as an int. Raises InvalidArgument (fields field, value) for a phase or a number of tokens that is none."""
    if phase not in _PHASES:
        raise refuse("phase", phase, f"one of {_PHASES}")
    try:
        count = index(tokens)  # of numpy and torch as well
    except TypeError:
        count = -1
    if count < 0 or isinstance(tokens, bool):
        raise refuse("tokens", tokens, "an int of at least 0")
    return count


def _gone(name: str) -> Callable[..., None]:
    # Not a method: a tenant that refers to itself would keep its streams until the next garbage collection.
    def refuse(layer: int, stream: int = 0) -> None:
        raise InvalidState(f"tenant {name!r} was detached, or its session closed; nothing was done", tenant=name)

    return refuse


class _Pass:
    """The context manager of `Tenant.forward`: made anew for each pass, so that it needs no state between them."""

    __slots__ = ("_mark", "_phase", "_stream", "_tenant", "_tokens")

    def __init__(self, tenant: Tenant, phase: str, tokens: int, stream: Any) -> None:
        self._tenant = tenant
        self._phase = phase
        self._tokens = tokens
        self._stream = stream
        self._mark = object()  # the turn's `open_pass` while this pass is open

    def __enter__(self) -> Tenant:
        self._tenant._begin_pass(self._stream, self._mark)
        return self._tenant

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._tenant._end_pass(self._phase, self._tokens, completed=kind is None)

    def __del__(self) -> None:
        # An interrupt can come before the first line of __exit__, or just behind __enter__: then nobody has ended the pass.
        mark = getattr(self, "_mark", None)  # set last: an interrupt can come inside of __init__ as well
        if mark is not None and self._tenant._turn.open_pass is mark:
            self._tenant._close_pass()  # takes no lock: the garbage collector may run while this thread holds it


class Tenant:
    """Made by `Session.attach`. `forward`, `wait` and `done` belong to one thread at a time, the engine's; other threads' calls
    of the session may run beside them (locking.py)."""

    def __init__(
        self,
        session: Session,
        number: int,
        name: str,
        priority: int,
        attachment: Attachment,
        kv: KVCache,
        prefetcher: Any,
        compute: ComputeStream,
        turn: Turn,
    ) -> None:
        self._session = session
        self._turn = turn
        self.number = number
        self.name = name
        self.priority = priority
        self.kv = kv
        self.layers = len(attachment.layer_bytes)
        self.wait = prefetcher.wait
        self.done = prefetcher.done
        self._attachment = attachment
        self._prefetcher = prefetcher
        self._compute = compute
        self._cost = CostModel(attachment.layer_bytes)
        self._unsettled: tuple[Plan, bool] | None = None  # decided and not settled; did the ring change
        pages_a_layer = attachment.pages.buffer_pages
        self._told_alpha = 0.0  # as of the last report
        self._blocks_per_page = kv.geometry.page_bytes / kv.spec.block_bytes
        self._blocks_per_layer = pages_a_layer * self._blocks_per_page
        self._shrink_blocks = math.ceil(self._blocks_per_layer) + 1  # blocks that straddle both ends
        self._free_pages: tuple[int, tuple[int, ...]] | None = None  # (epoch, pages), see policy.free_pages_of
        self._times: LayerTimes | None = None
        self._times_age = 0
        self._times_asked = False
        self._prepare: Callable[[LayerTimes], None] | None = None  # the session's: what growth will ask of these times
        self._prepared: LayerTimes | None = None
        self._prepared_age = _PREPARE_EVERY
        self.active = True
        self._clock = session.clock
        self._last_pass_s = self._clock()  # when the last pass ended
        self._last_use = 0  # the session's count of activations at the last one
        self._leaving = False  # being detached, which has failed: only trying it again is allowed
        self._detached = False
        self._all_ready = False  # every layer was seen ready since the last change
        self._absent: set[int] = (
            set()
        )  # found when the tenant leaves: layers whose bytes are not all at their addresses
        self.hooks: AttachedHooks | None = None
        self._unseen: set[int] | None = None  # see expect_whole_pass()
        self._first_wait: Any = None
        self._from_masters: set[int] = set()  # layers that the open pass, or the last one, takes from weights files
        self._changed_file: InvalidState | None = (
            None  # a weights file changed while layers came from it: no pass any more
        )
        self._shapes: deque[tuple[int, Phase, int]] = deque(
            maxlen=_UNTIMED
        )  # (number, phase, tokens) of passes not timed yet
        self._last_shape: tuple[Phase, int] | None = (
            None  # of the last decode pass timed, or of any pass before the first decode
        )
        self._prompts: deque[int] = deque(maxlen=64)  # tokens of the last prefills
        self._seen_copy_s = 0.0
        self._seen_bytes = 0
        self._seen_copies = 0
        self._compute_s = 0.0
        self._abandoned = 0
        self._predicted_stall_s = 0.0
        self._slowdown = 0.0  # the config's; set by admit
        self._by_hand = False  # what streams was decided by hand: no certificate bounds it
        self._since = (0, 0.0)  # completed passes and their stall seconds when the last change was made
        self._selection = ""
        self._slices = False
        self._depths: tuple[tuple[int, ...], int, int] | None = None  # see policy._depths; of which order
        self._hidden: Any = None  # the answers of bounds.HiddenCopies; set by admit
        self._others: Any = None  # (need) -> what other tenants offer; set by admit

    # -- passes ----------------------------------------------------------------------------------------------------

    def forward(self, phase: str = "decode", tokens: int = 1, stream: Any = None) -> _Pass:
        """Brackets one pass. phase ("prefill", "decode" or "mixed") and tokens (in the batch) sort the time measurements.

        stream: what the pass computes on: anything with `__cuda_stream__()`, a torch.cuda.Stream, or a handle as an integer.
        By default that is torch's current stream on a GPU, and the calling thread where the processor itself computes.
        Whatever touches this tenant's memory is enqueued on the stream of its last pass, or ordered behind it by the caller;
        it may be another stream in every pass. A stream has to live until the tenant has another one or is detached.

        Raises InvalidArgument (fields field, value) for another phase, or tokens that are no int of at least 0. Entering raises
        InvalidState if the session is closed, the tenant detached or a pass open already, InvalidArgument for
        what is no stream of the session's device, and the backend's error if the last change could not be finished; then no
        pass has begun and entering again tries it again. An exception inside abandons the pass: the next one starts afresh.

        Leaving a pass that was not abandoned raises InvalidState if its results must be discarded: (fields tenant, layer, layers)
        layers that were streamed or loading were not waited for, so what was computed with them is not known; (tenant, written)
        the model, or somebody since the last pass, wrote into a streamed layer, and such a write is lost; (file, expected,
        found) a weights file that layers come from has changed, which entering raises as well. The pass has ended then.
        """
        if phase not in _PHASES or tokens.__class__ is not int or tokens < 0:
            tokens = _checked(phase, tokens)
        return _Pass(self, phase, tokens, stream)

    @property
    def _in_pass(self) -> bool:
        return self._turn.open_pass is not None

    @property
    def _busy(self) -> bool:
        """Whether the change in progress must leave it alone: it was inside a pass when that began, or is being detached."""
        return self._leaving or not self._turn.claimed

    def _begin_pass(self, stream: Any, mark: object) -> None:
        self._session._lock.refuse_fork()
        if not self._try_begin(stream, mark):
            self._session._begin_behind_changes(self, stream, mark)

    def _try_begin(self, stream: Any, mark: object, finished: bool = False) -> bool:
        """Begin a pass, unless a change is in progress or has left something to be finished first. finished: that has been done
        just now; a re-pointing that has failed since is told by `wait` for its layer."""
        with self._turn.lock:
            begun = self._begin_now(stream, mark, finished)
        if begun:
            nvtx.push("remap.pass")
        return begun

    def _begin_now(self, stream: Any, mark: object, finished: bool) -> bool:
        session, turn = self._session, self._turn
        if turn.open_pass is not None or self._leaving or self._detached or session.closed or not self.active:
            why = "a pass is open" if turn.open_pass is not None else "it is inactive; call session.activate() first"
            if session.closed or self._detached:
                why = "the session is closed" if session.closed else "it was detached"
            elif self._leaving:
                why = "taking it out has failed; detach it again, or close the session"
            raise InvalidState(f"tenant {self.name!r}: {why}; no pass was begun", tenant=self.name)
        session._check_open()
        if self._attachment.verify is not None:
            self._from_masters = self.away()
            self._verify_masters()
        if turn.claimed:
            return False
        if not finished and (self._unsettled is not None or session._executor.failed_points(self.number)):
            return False
        turn.open_pass = mark  # before the pass begins: __exit__ or __del__ ends it then, whatever comes between
        try:
            self._prefetcher.begin_pass(self._compute.begin(stream))
        except BaseException:
            self._close_pass()
            raise
        if self._unseen is not None:
            self._unseen.update(range(self.layers))
        return True

    def _close_pass(self) -> None:
        """However far it came, no pass is open. Can be called again."""
        try:
            if self._prefetcher is not None and self._prefetcher.in_pass:
                self._abandoned += 1  # without a shape its time teaches nothing
                self._prefetcher.end_pass()
        except Error:
            pass  # a stream that takes no events (it is being captured): the next pass abandons this one in the core
        finally:
            self._turn.open_pass = None

    def _end_pass(self, phase: str, tokens: int, *, completed: bool) -> None:
        try:
            self._finish_pass(phase, tokens, completed)
        finally:
            nvtx.pop()
            # Last of all: until now no change has claimed this tenant, and what was learnt is read by changes.
            self._close_pass()

    def _finish_pass(self, phase: str, tokens: int, completed: bool) -> None:
        if self._detached:
            if not completed:
                return  # the caller has an exception already
            raise InvalidState(f"tenant {self.name!r}: the session was closed inside of the pass", tenant=self.name)
        self._last_pass_s = self._clock()
        missed = self._prefetcher.unwaited() if completed else []
        number = self._prefetcher.end_pass()
        if completed and not missed:
            self._shapes.append((number, "decode" if phase == "decode" else "prefill", max(1, tokens)))
        else:
            self._abandoned += 1  # without a shape its time teaches nothing
        for timed, seconds, stall_s in self._prefetcher.take_timings():
            while self._shapes and self._shapes[0][0] < timed:
                self._shapes.popleft()
            if self._shapes and self._shapes[0][0] == timed:
                _, kind, count = self._shapes.popleft()
                compute_s = max(0.0, seconds - stall_s)
                self._learn(kind, count, compute_s)
                if not self._by_hand:
                    self._session._stalls.add(
                        self.number,
                        compute_s,
                        stall_s,
                        predicted_s=self._predicted_stall_s,
                        slowdown=self._slowdown,
                        active=self._session.active_numbers,
                    )
        if not completed:
            return
        if missed:
            raise InvalidState(
                f"tenant {self.name!r}: the pass did not wait for layers {missed}, which were streamed or loading, so what it "
                "computed with them is not known; the pass has ended and its results, KV included, must be discarded; call the "
                "layers as modules, with their hooks in place, or call wait and done for every layer in every pass",
                tenant=self.name,
                layer=missed[0],
                layers=tuple(missed),
            )
        if self._unseen is not None and not self._unseen:
            self._unseen = None
            if self.wait is self._first_wait:
                self.wait = self._prefetcher.wait
        if self._from_masters:
            self._verify_masters()
        if self.streamed:
            self.refuse_lost_writes()

    def _learn(self, kind: Phase, tokens: int, compute: float) -> None:
        """Of one pass and its seconds of computation: now if the host computed it, passes later if a stream did."""
        stats = self._prefetcher.stats()
        self._compute_s += compute
        copied = stats.timed_bytes - self._seen_bytes
        if copied:
            self._cost.observe_pass(
                kind,
                tokens,
                compute,
                copies=stats.copies - self._seen_copies,
                copy_s=stats.copy_s - self._seen_copy_s,
                bytes_copied=copied,
            )
            self._seen_copies, self._seen_copy_s, self._seen_bytes = stats.copies, stats.copy_s, stats.timed_bytes
        else:
            self._cost.observe_pass(kind, tokens, compute)
        if kind == "prefill":
            self._prompts.append(tokens)
        self._times_age += 1
        shape = (kind, bucket_of(tokens))
        if shape != self._last_shape and (
            kind == "decode" or self._last_shape is None or self._last_shape[0] != "decode"
        ):
            self._last_shape = shape
            self._times_age = _TIMES_EVERY
        self._prepared_age += 1
        if self._times_asked and self._prepared_age >= _PREPARE_EVERY and self._prepare is not None:
            times = self.times()
            if times is not None and times is not self._prepared:
                self._prepare(times)
                self._prepared, self._prepared_age = times, 0

    def refuse_lost_writes(self) -> None:
        """Raises InvalidState (fields tenant, written). Layers written before they were to be streamed are pinned, so what is
        found now was written into the ring."""
        written = self._attachment.writes(self.streamed)
        if written:
            raise InvalidState(
                f"tenant {self.name!r}: something wrote into layers while they were streamed, or replaced their tensors, and "
                f"that is lost: {written}; detach it; name these tensors in attach(mutable=), or run a pass before remapping "
                "so that they are found",
                tenant=self.name,
                written=written,
            )

    def _verify_masters(self) -> None:
        """Raises InvalidState (fields file, expected, found) if a weights file that layers of this pass come from has changed.

        The tenant can only be detached then: what was copied since is not known, so those layers count as not at home.
        """
        if self._changed_file is None:
            try:
                self._attachment.verify(self._from_masters)
            except InvalidState as error:
                self._absent.update(self._from_masters)
                self._changed_file = error
        if self._changed_file is not None:
            raise InvalidState(str(self._changed_file), **self._changed_file.fields, tenant=self.name)

    def expect_whole_pass(self) -> None:
        """Hooks were put in, and whether they work is not known: until one pass has waited for every layer, none is streamed."""
        unseen = self._unseen = set(range(self.layers))
        core = self._prefetcher.wait

        # Not a method: a tenant that refers to itself would keep its streams until the next garbage collection.
        def wait(layer: int, stream: int = 0) -> None:
            core(layer, stream)
            unseen.discard(layer)

        self.wait = self._first_wait = wait

    def refuse_unseen(self) -> None:
        """Raises InvalidState (fields tenant, layers) while no pass has waited for every layer, unless the tenant is inactive:
        what it lends comes home before its next pass, or is looked for in it like everything that is streamed."""
        if self._unseen is not None and self.active:
            raise InvalidState(
                f"tenant {self.name!r}: no pass has waited for every layer yet, so nothing may be streamed; nothing changed; run "
                f"one whole pass first (layers {sorted(self._unseen)} were not waited for in the last one), or attach with "
                "hooks=False if the engine calls wait and done itself",
                tenant=self.name,
                layers=tuple(sorted(self._unseen)),
            )

    def refuse_pass(self, leaving: bool = False, asleep: bool = False) -> None:
        """Raises InvalidState (field tenant) if a pass is open, or detaching has failed (unless `leaving`), or, with `asleep`, if
        the tenant is inactive."""
        if self._leaving and not leaving:
            raise InvalidState(
                f"taking tenant {self.name!r} out has failed; nothing changed; detach it again, or close the session",
                tenant=self.name,
            )
        if not self._turn.claimed:
            raise InvalidState(
                f"tenant {self.name!r} is inside a pass; nothing changed; call this between passes",
                tenant=self.name,
            )
        if asleep and not self.active:
            raise InvalidState(
                f"tenant {self.name!r} is inactive and can have no demand; nothing changed; call session.activate() first",
                tenant=self.name,
            )

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def streamed(self) -> tuple[int, ...]:
        """The layers that are loaded on each pass, ascending."""
        return self._attachment.pages.streamed

    @property
    def buffers(self) -> int:
        """Ring buffers in use (beta); 0 while nothing is streamed."""
        return len(self._attachment.pages.ring)

    @property
    def remapped(self) -> int:
        """alpha: layers' worth of pages that are KV now, or lent; in slices rounded down (see `alpha`)."""
        pages = self._attachment.pages
        if pages.tail_pages:
            return int(self.alpha)
        return max(0, len(pages.streamed) - len(pages.ring))

    @property
    def alpha(self) -> float:
        """Layers' worth of pages that are KV now, or lent: fractional in slices."""
        pages = self._attachment.pages
        if not pages.tail_pages:
            return float(self.remapped)
        return alpha_of([pages.homes[layer] for layer in pages.streamed], pages.tail_pages, len(pages.ring))

    @property
    def streaming(self) -> bool:
        """Whether wait() has something to do in the next pass, for any layer: it is streamed, loading, or being re-pointed.

        While False, a pass may leave out wait and done, so one CUDA graph may hold all of its layers.
        """
        self._session._lock.refuse_fork()
        if self._all_ready or self._detached:
            return False
        if self.streamed or self._unsettled is not None:
            return True
        self._all_ready = all(map(self._prefetcher.ready, range(self.layers)))
        return not self._all_ready

    @property
    def in_pass(self) -> bool:
        """Whether a pass is open."""
        return self._in_pass

    @property
    def seen(self) -> bool:
        """Whether its layers may be streamed: a whole pass has waited for each of them, or the engine has said that it does."""
        return self._unseen is None

    @property
    def modules(self) -> tuple[Any, ...]:
        """The layers as torch modules, `extra_layers` behind the others; () if it was attached as bytes."""
        return self._attachment.modules

    def away(self) -> set[int]:
        """The layers whose bytes are not, or not all, at their addresses now: streamed, loading, or to be re-pointed."""
        found = set(self._absent)
        if self.streaming:
            found.update(self.streamed)
            found.update(layer for layer in range(self.layers) if not self._prefetcher.ready(layer))
            if self._unsettled is not None:
                found.update(self._unsettled[0].reload, self._unsettled[0].held)
        return found

    def at_home(self, layer: int) -> bool:
        """Whether all bytes of the layer are at its address."""
        return not self._detached and layer not in self.away()

    @property
    def pinned(self) -> tuple[int, ...]:
        """Layers that may not be streamed: something wrote into them after attach, or their weights file was changed, or their
        memory is registered elsewhere."""
        return tuple(sorted(self._attachment.pinned))

    @property
    def written(self) -> dict[int, list[str]]:
        """layer -> the tensors that were found written after attach, or the weights file that was."""
        return {layer: list(paths) for layer, paths in self._attachment.written.items()}

    @property
    def lent_pages(self) -> int:
        """Pages of its layers that are free for other tenants, or their KV."""
        return len(self._attachment.pages.lent)

    def prefill_times(self) -> LayerTimes | None:
        """Seconds per layer of a short prefill (the tenth percentile of the prompts seen lately), for what a reload may cost
        an inactive tenant; None before the first pass. Where no prefill was seen, passes that were."""
        if not self._cost.measured:
            return None
        tokens = sorted(self._prompts)
        return self._cost.estimate("prefill", tokens[len(tokens) // 10] if tokens else 1)

    def copy_seconds(self) -> float:
        """Measured seconds to copy in one layer, the mean; 0 if the link was not measured."""
        rate = self._cost.seconds_per_byte
        return rate * sum(self._attachment.layer_bytes) / self.layers if rate else 0.0

    def times(self) -> LayerTimes | None:
        """Measured seconds per layer for the shape of the last decode pass; None before the first pass.

        The same object for some passes: whatever is computed from it (the exact bound) can be kept meanwhile.
        """
        self._times_asked = True
        if self._last_shape is None:
            return None
        if self._times is None or self._times_age >= _TIMES_EVERY:
            self._times = self._cost.estimate(*self._last_shape)
            self._times_age = 0
        return self._times

    def _restore_model(self, device: Any) -> None:
        """Put the model's tensors back onto ordinary memory. Streamed layers, and those not loaded yet, from their masters."""
        self._attachment.detach(sorted(self._absent), device)

    def _retire(self) -> None:
        """The memory goes away: from now on wait and done raise instead of touching it, and no hook calls them."""
        if self.hooks is not None:
            self.hooks.remove()
        self._detached = True
        self.kv.retire()
        self.wait = self.done = _gone(self.name)

    def _release(self) -> None:
        """It has gone: the copy stream and its events go too, and whatever kept master copies alive."""
        prefetcher, self._prefetcher = self._prefetcher, None
        if prefetcher is not None:
            self._session._streams.retire(prefetcher)
        self._attachment.keep_alive = None

    def calibrate_link(self, bytes_per_s: float) -> None:
        """Sets the estimate of the copy bandwidth, in bytes per second; measured copies refine it."""
        self._cost.calibrate(bytes_per_s=bytes_per_s)
        self._times = None

    def select(self, remapped: int, buffers: int, selection: str = "nested") -> tuple[int, ...]:
        """The layers to stream for `remapped` layers' worth of KV: see `Attachment.select`."""
        if selection == "best" and self._times is not None:
            return select("best", self._attachment.order, remapped, buffers, times=self._times, present=self.streamed)
        return self._attachment.select(remapped, buffers, selection)

    @property
    def slicing(self) -> bool:
        """Whether what streams next, or now, is a slice of every layer."""
        pages = self._attachment.pages
        return pages.tail_pages > 0 or (self._slices and not pages.streamed)

    @property
    def growing_by(self) -> str:
        """The selection by which more layers go: an inactive tenant's last ones, unless others are streamed already."""
        return "suffix" if not self.active and self._attachment.streams_suffix else "onward"

    def lends(self, layer: int) -> bool:
        """Whether other tenants have pages of this layer, or may take them, or it waits to come home from there."""
        return self._attachment.lends(layer)

    def slots_of(self, pages: Sequence[int]) -> Sequence[int]:
        """Slots of the KV region at which these pages stand; a range where they are consecutive, which is the fast case."""
        return self._attachment.slots_of(pages, self.kv.geometry)

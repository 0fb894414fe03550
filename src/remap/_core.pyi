# Generated from the bindings (python/*.cpp): make stubs. tools/import_rules.py says which modules may use the core.
"""
The C++ core of remap: pages, mappings, plans, prefetching. Use it through the package.
"""

from __future__ import annotations
import collections.abc
import typing
import typing_extensions

__all__: list[str] = [
    "Access",
    "Applied",
    "Arena",
    "Backend",
    "BytesView",
    "Call",
    "CudaPages",
    "ErrorKind",
    "Executor",
    "FaultBackend",
    "HostUse",
    "Lease",
    "Mode",
    "Owner",
    "PageOrder",
    "Plan",
    "PrefetchStats",
    "Prefetcher",
    "ReplayResult",
    "ShareableHandle",
    "SimBackend",
    "TraceBackend",
    "TraceRecord",
    "buffer_address",
    "fill_bytes",
    "fork_generation",
    "host_room",
    "machine_room",
    "make_cuda_backend",
    "make_cuda_pages",
    "make_fault_backend",
    "make_host_backend",
    "make_limit_backend",
    "make_sim_backend",
    "make_trace_backend",
    "parse_trace",
    "probe_cuda",
    "replay",
    "serialize_trace",
]

class BytesView:
    """
    A range of device memory as a one-dimensional uint8 tensor for from_dlpack(); keeps `owner` alive.
    """
    def __dlpack__(self, **kwargs: typing.Any) -> typing.Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __init__(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        nbytes: typing.SupportsInt | typing.SupportsIndex,
        owner: typing.Any,
        kind: str = "host",
        index: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...

class HostUse:
    """
    Members:

      locked

      staged
    """

    __members__: typing.ClassVar[dict[str, HostUse]]
    locked: typing.ClassVar[HostUse]
    staged: typing.ClassVar[HostUse]
    @typing.overload
    def __eq__(self, other: HostUse) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: HostUse) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Access:
    """
    Members:

      none

      read

      read_write
    """

    __members__: typing.ClassVar[dict[str, Access]]
    none: typing.ClassVar[Access]
    read: typing.ClassVar[Access]
    read_write: typing.ClassVar[Access]
    @typing.overload
    def __eq__(self, other: Access) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Access) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Backend:
    def adopt_stream(self, native: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def allocate_host(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def copy(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def copy_batch(
        self,
        stream: typing.SupportsInt | typing.SupportsIndex,
        ranges: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ],
    ) -> None: ...
    def create_event(self, timed: bool = True) -> int: ...
    def create_page(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def create_stream(self) -> int: ...
    def destroy_event(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def destroy_page(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def destroy_stream(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def elapsed(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> float: ...
    def exchange(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def fill(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def forget_stream(self, stream: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def free_host(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def map(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        arg2: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def populate(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def query(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def record(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def register_host(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
        use: HostUse = HostUse.locked,
    ) -> None: ...
    def release(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def reserve(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> int: ...
    def retire(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def set_access(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: Access,
    ) -> None: ...
    def stream_wait(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def synchronize(
        self, event: typing.SupportsInt | typing.SupportsIndex, timeout_s: typing.SupportsFloat | typing.SupportsIndex
    ) -> bool: ...
    def unmap(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def unregister_host(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def usage(self) -> dict[str, int]: ...
    def use_host(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
        use: HostUse,
    ) -> None: ...
    @property
    def can_exchange(self) -> bool: ...
    @property
    def device_index(self) -> int: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def granularity(self) -> int: ...
    @property
    def host_addressable(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def new_pages_are_zero(self) -> bool: ...
    @property
    def simulator(self) -> SimBackend: ...

class Call:
    """
    Members:

      reserve

      release

      retire

      create_page

      destroy_page

      map

      unmap

      set_access

      exchange

      populate

      allocate_host

      free_host

      register_host

      unregister_host

      use_host

      create_stream

      destroy_stream

      adopt_stream

      forget_stream

      copy

      copy_batch

      fill

      create_event

      destroy_event

      record

      stream_wait

      query

      synchronize

      elapsed
    """

    __members__: typing.ClassVar[dict[str, Call]]
    adopt_stream: typing.ClassVar[Call]
    allocate_host: typing.ClassVar[Call]
    copy: typing.ClassVar[Call]
    copy_batch: typing.ClassVar[Call]
    create_event: typing.ClassVar[Call]
    create_page: typing.ClassVar[Call]
    create_stream: typing.ClassVar[Call]
    destroy_event: typing.ClassVar[Call]
    destroy_page: typing.ClassVar[Call]
    destroy_stream: typing.ClassVar[Call]
    elapsed: typing.ClassVar[Call]
    exchange: typing.ClassVar[Call]
    fill: typing.ClassVar[Call]
    forget_stream: typing.ClassVar[Call]
    free_host: typing.ClassVar[Call]
    map: typing.ClassVar[Call]
    populate: typing.ClassVar[Call]
    query: typing.ClassVar[Call]
    record: typing.ClassVar[Call]
    register_host: typing.ClassVar[Call]
    release: typing.ClassVar[Call]
    reserve: typing.ClassVar[Call]
    retire: typing.ClassVar[Call]
    set_access: typing.ClassVar[Call]
    stream_wait: typing.ClassVar[Call]
    synchronize: typing.ClassVar[Call]
    unmap: typing.ClassVar[Call]
    unregister_host: typing.ClassVar[Call]
    use_host: typing.ClassVar[Call]
    @typing.overload
    def __eq__(self, other: Call) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Call) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ErrorKind:
    """
    Members:

      driver

      out_of_memory

      limit_exceeded

      invalid_argument
    """

    __members__: typing.ClassVar[dict[str, ErrorKind]]
    driver: typing.ClassVar[ErrorKind]
    invalid_argument: typing.ClassVar[ErrorKind]
    limit_exceeded: typing.ClassVar[ErrorKind]
    out_of_memory: typing.ClassVar[ErrorKind]
    @typing.overload
    def __eq__(self, other: ErrorKind) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: ErrorKind) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class FaultBackend(Backend):
    def arm(
        self, call: Call, nth: typing.SupportsInt | typing.SupportsIndex, forever: bool = False, kind: ErrorKind = ...
    ) -> None: ...
    def arm_any(
        self, nth: typing.SupportsInt | typing.SupportsIndex, forever: bool = False, kind: ErrorKind = ...
    ) -> None: ...
    def calls(self, call: typing.Any = None) -> int: ...
    def disarm(self) -> None: ...
    def fail_async_copy(self, nth: typing.SupportsInt | typing.SupportsIndex, forever: bool = False) -> None: ...

class TraceRecord:
    @property
    def args(self) -> typing.Annotated[list[int], "FixedSize(5)"]: ...
    @property
    def call(self) -> Call: ...
    @property
    def failed(self) -> bool: ...
    @property
    def list(self) -> list[int]: ...
    @property
    def result(self) -> int: ...

class TraceBackend(Backend):
    def clear_log(self) -> None: ...
    def count(self, call: typing.Any = None) -> int: ...
    def log(self) -> list[TraceRecord]: ...
    def set_logging(self, arg0: bool) -> None: ...

class ReplayResult:
    @property
    def divergence(self) -> int: ...
    @property
    def message(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def replayed(self) -> int: ...

class ShareableHandle:
    """
    Members:

      none

      posix_fd

      fabric
    """

    __members__: typing.ClassVar[dict[str, ShareableHandle]]
    fabric: typing.ClassVar[ShareableHandle]
    none: typing.ClassVar[ShareableHandle]
    posix_fd: typing.ClassVar[ShareableHandle]
    @typing.overload
    def __eq__(self, other: ShareableHandle) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: ShareableHandle) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CudaPages:
    def close(self) -> None: ...
    def export_page(self, number: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def import_page(self, descriptor: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def uuid(self) -> str: ...

class SimBackend(Backend):
    def advance(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def advance_to(self, time: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def compute(
        self, stream: typing.SupportsInt | typing.SupportsIndex, seconds: typing.SupportsFloat | typing.SupportsIndex
    ) -> float: ...
    def finish(self, stream: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def hold(
        self, stream: typing.SupportsInt | typing.SupportsIndex, time: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...
    def join(self) -> None: ...
    def read_clock(self) -> float:
        """
        `now` as a method, for who takes a clock as a callable.
        """
    def stream_end(self, stream: typing.SupportsInt | typing.SupportsIndex) -> float: ...
    def traffic(self) -> dict[str, dict[str, float]]: ...
    @property
    def backed(self) -> bool: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def machine(self) -> str: ...
    @property
    def now(self) -> float: ...

class Owner:
    """
    Members:

      free

      params

      kv

      ring

      outside

      quarantine
    """

    __members__: typing.ClassVar[dict[str, Owner]]
    free: typing.ClassVar[Owner]
    kv: typing.ClassVar[Owner]
    outside: typing.ClassVar[Owner]
    params: typing.ClassVar[Owner]
    quarantine: typing.ClassVar[Owner]
    ring: typing.ClassVar[Owner]
    @typing.overload
    def __eq__(self, other: Owner) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Owner) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Mode:
    """
    Members:

      aliased

      strict
    """

    __members__: typing.ClassVar[dict[str, Mode]]
    aliased: typing.ClassVar[Mode]
    strict: typing.ClassVar[Mode]
    @typing.overload
    def __eq__(self, other: Mode) -> bool: ...
    @typing.overload
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    @typing.overload
    def __ne__(self, other: Mode) -> bool: ...
    @typing.overload
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Lease:
    """
    Keeps the addresses of one region while it lives: see Arena.hold.
    """

class PageOrder:
    """
    Pages in an order, for Arena.count_free and first_free.
    """
    def __init__(self, pages: typing.Sequence[int]) -> None: ...

class Arena:
    def __init__(
        self,
        backend: Backend,
        capacity_bytes: typing.SupportsInt | typing.SupportsIndex,
        page_bytes: typing.SupportsInt | typing.SupportsIndex,
        mode: Mode,
        outside: bool = False,
    ) -> None: ...
    def add_empty_layer_region(
        self,
        tenant: typing.SupportsInt | typing.SupportsIndex,
        name: str,
        slots: typing.SupportsInt | typing.SupportsIndex,
        stand_in: typing.SupportsInt | typing.SupportsIndex = 4294967295,
    ) -> int: ...
    def add_kv_region(
        self, tenant: typing.SupportsInt | typing.SupportsIndex, slots: typing.SupportsInt | typing.SupportsIndex
    ) -> int: ...
    def add_layer_region(
        self, tenant: typing.SupportsInt | typing.SupportsIndex, name: str, pages: typing.Sequence[int]
    ) -> int: ...
    def add_ring_region(
        self, tenant: typing.SupportsInt | typing.SupportsIndex, slots: typing.SupportsInt | typing.SupportsIndex
    ) -> int: ...
    def address(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def count_free(self, arg0: PageOrder) -> int: ...
    def counts(self, tenant: typing.Any = None) -> dict[str, int]: ...
    def declare_registered(
        self, address: typing.SupportsInt | typing.SupportsIndex, nbytes: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def designate(
        self,
        region: typing.SupportsInt | typing.SupportsIndex,
        first_slot: typing.SupportsInt | typing.SupportsIndex,
        pages: typing.Sequence[int],
    ) -> None: ...
    def designate_ring(
        self,
        region: typing.SupportsInt | typing.SupportsIndex,
        first_slot: typing.SupportsInt | typing.SupportsIndex,
        pages: typing.Sequence[int],
    ) -> None: ...
    def first_free(self, order: PageOrder, most: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    def fix(
        self,
        region: typing.SupportsInt | typing.SupportsIndex,
        first_slot: typing.SupportsInt | typing.SupportsIndex,
        pages: typing.Sequence[int],
    ) -> None: ...
    def free_pages(self) -> list[int]: ...
    def hold(
        self, address: typing.SupportsInt | typing.SupportsIndex, nbytes: typing.SupportsInt | typing.SupportsIndex
    ) -> Lease: ...
    def knows(self, tenant: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def owners(self) -> list[Owner]: ...
    def prepare_view(self, region: typing.SupportsInt | typing.SupportsIndex, pages: typing.Sequence[int]) -> None: ...
    def region_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def registered(self) -> list[tuple[int, int]]: ...
    def remove_tenant(self, tenant: typing.SupportsInt | typing.SupportsIndex, undoing: bool = False) -> None: ...
    def seal(self, kv_region: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def shown(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    def take(
        self,
        count: typing.SupportsInt | typing.SupportsIndex,
        owner: Owner,
        tenant: typing.SupportsInt | typing.SupportsIndex,
        excluded: typing.Sequence[int] = [],
    ) -> list[int]: ...
    def tenants(self) -> list[int]: ...
    def tenants_of(self, arg0: typing.Sequence[int]) -> list[int]: ...
    def withdraw_registered(
        self, address: typing.SupportsInt | typing.SupportsIndex, nbytes: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    @property
    def broken(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def regions(self) -> int: ...
    @property
    def total_pages(self) -> int: ...

class Plan:
    def __init__(self, epoch: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def point(
        self,
        region: typing.SupportsInt | typing.SupportsIndex,
        first_slot: typing.SupportsInt | typing.SupportsIndex,
        pages: typing.Sequence[int],
        deferred: bool,
        layer: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def set_home(self, region: typing.SupportsInt | typing.SupportsIndex, pages: typing.Sequence[int]) -> None: ...
    def set_owner(
        self,
        pages: typing.Sequence[int],
        from_owner: Owner,
        to_owner: Owner,
        tenant: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    @property
    def epoch(self) -> int: ...
    @epoch.setter
    def epoch(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Applied:
    @property
    def due(self) -> list[int]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def pages_moved(self) -> int: ...
    @property
    def points_deferred(self) -> int: ...
    @property
    def points_done(self) -> int: ...
    @property
    def zeroed_bytes(self) -> int: ...

class Executor:
    def __init__(self, arena: Arena) -> None: ...
    def apply(
        self,
        plan: Plan,
        after: typing.SupportsInt | typing.SupportsIndex = 0,
        zero_on: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> Applied: ...
    def commit(
        self, prefetcher: Prefetcher | None, after: typing.SupportsInt | typing.SupportsIndex = 0, asleep: bool = False
    ) -> None: ...
    def commit_each(
        self,
        shares: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                Prefetcher | None,
                typing.SupportsInt | typing.SupportsIndex,
                bool,
            ]
        ],
    ) -> None: ...
    def drain(self) -> None: ...
    def extend(
        self,
        plan: Plan,
        after: typing.SupportsInt | typing.SupportsIndex = 0,
        zero_on: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> Applied: ...
    def failed_points(self, tenant: typing.SupportsInt | typing.SupportsIndex | None = None) -> int: ...
    def forget(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def mark(self) -> int: ...
    def retry_failed(self, tenant: typing.SupportsInt | typing.SupportsIndex | None = None) -> None: ...
    def rollback(self, mark: typing.SupportsInt | typing.SupportsIndex | None = None) -> None: ...
    def stop(self) -> None: ...
    def undecided(self) -> bool: ...
    def wake(
        self, tenant: typing.SupportsInt | typing.SupportsIndex, after: typing.SupportsInt | typing.SupportsIndex = 0
    ) -> None: ...
    def zero_due(self) -> int: ...

class PrefetchStats:
    @property
    def abandoned(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def copy_s(self) -> float: ...
    @property
    def last_pass_copies(self) -> int: ...
    @property
    def last_pass_s(self) -> float: ...
    @property
    def last_pass_stall_s(self) -> float: ...
    @property
    def misses(self) -> int: ...
    @property
    def passes(self) -> int: ...
    @property
    def stall_s(self) -> float: ...
    @property
    def timed_bytes(self) -> int: ...

class Prefetcher:
    def __init__(
        self,
        backend: Backend,
        layers: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ],
        keep: typing.Any = None,
        chunk_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def begin_pass(
        self,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
        blocks: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ] = [],
        filled: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def close(self) -> None: ...
    def configure(
        self,
        streamed: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        ring: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        ring_bytes: typing.SupportsInt | typing.SupportsIndex,
        held: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        after: typing.SupportsInt | typing.SupportsIndex = 0,
        fresh: bool = False,
        offsets: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        places: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        home: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ] = [],
        elsewhere: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    ) -> None: ...
    @typing.overload
    def done(
        self, layer: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex = 0
    ) -> None: ...
    @typing.overload
    def done(self, layer: typing.Any, stream: typing.Any = 0) -> None: ...
    def drain(self) -> None: ...
    def end_pass(self) -> int: ...
    def loading(self) -> bool: ...
    @typing.overload
    def ready(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    @typing.overload
    def ready(self, arg0: typing.Any) -> bool: ...
    def stats(self) -> PrefetchStats: ...
    def stream_blocks(
        self,
        layers: collections.abc.Sequence[
            collections.abc.Sequence[
                tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
            ]
        ],
        unit_bytes: typing.SupportsInt | typing.SupportsIndex,
        buffers: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def take_timings(self) -> list[tuple[int, float, float]]: ...
    def unwaited(self) -> list[int]: ...
    @typing.overload
    def wait(
        self, layer: typing.SupportsInt | typing.SupportsIndex, stream: typing.SupportsInt | typing.SupportsIndex = 0
    ) -> None: ...
    @typing.overload
    def wait(self, layer: typing.Any, stream: typing.Any = 0) -> None: ...
    @property
    def copy_stream(self) -> int: ...
    @property
    def in_pass(self) -> bool: ...

def buffer_address(buffer: typing_extensions.Buffer) -> int:
    """
    Where a buffer's bytes are. The caller keeps the buffer alive.
    """

def fill_bytes(
    address: typing.SupportsInt | typing.SupportsIndex,
    nbytes: typing.SupportsInt | typing.SupportsIndex,
    value: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Host-addressable memory only (tests: poison).
    """

def fork_generation() -> int:
    """
    Grows by one in every forked child.
    """

def host_room(budget_bytes: typing.SupportsInt | typing.SupportsIndex = 0) -> tuple[int, str]: ...
def machine_room() -> tuple[int, str]: ...
def make_cuda_backend(
    device: typing.SupportsInt | typing.SupportsIndex = 0,
    library: str = "",
    shareable: ShareableHandle = ...,
    gpu_direct_rdma: bool = False,
    host_budget_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
    host_piece_bytes: typing.SupportsInt | typing.SupportsIndex = 1073741824,
    pages: CudaPages | None = None,
) -> Backend: ...
def make_cuda_pages(
    page_bytes: typing.SupportsInt | typing.SupportsIndex,
    count: typing.SupportsInt | typing.SupportsIndex = 0,
    device: typing.SupportsInt | typing.SupportsIndex = 0,
    uuid: str = "",
    library: str = "",
) -> CudaPages: ...
def make_fault_backend(inner: Backend) -> FaultBackend: ...
def make_host_backend(
    capacity_bytes: typing.SupportsInt | typing.SupportsIndex,
    page_bytes: typing.SupportsInt | typing.SupportsIndex,
    copy_threads: typing.SupportsInt | typing.SupportsIndex = 1,
    file: typing.SupportsInt | typing.SupportsIndex | None = None,
) -> Backend: ...
def make_limit_backend(inner: Backend, **kwargs: int) -> Backend: ...
def make_sim_backend(
    *,
    capacity_bytes: typing.SupportsInt | typing.SupportsIndex,
    h2d_bytes_per_s: typing.SupportsFloat | typing.SupportsIndex,
    d2h_bytes_per_s: typing.SupportsFloat | typing.SupportsIndex,
    hbm_bytes_per_s: typing.SupportsFloat | typing.SupportsIndex,
    granularity: typing.SupportsInt | typing.SupportsIndex = 2097152,
    duplex: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    copy_setup_s: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    create_page_s: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    map_s: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    set_access_s: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    unmap_s: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    contention: bool = True,
    backed: bool = False,
    machine: str = "custom",
) -> SimBackend: ...
def make_trace_backend(inner: Backend) -> TraceBackend: ...
def parse_trace(arg0: str) -> list[TraceRecord]: ...
def probe_cuda(library: str = "") -> dict[str, typing.Any]: ...
def replay(arg0: collections.abc.Sequence[TraceRecord], arg1: Backend) -> ReplayResult: ...
def serialize_trace(arg0: collections.abc.Sequence[TraceRecord]) -> str: ...

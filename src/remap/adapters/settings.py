# SPDX-License-Identifier: Apache-2.0
"""The settings of engine plugins: read from environment variables into one frozen value and checked as a whole.

An engine loads a plugin in processes that the user does not start himself; only environment variables reach all of
them. `remap plan` prints these lines for a machine and a model. A plugin without REMAP_ENABLE reads no other variable
and does nothing.

    REMAP_ENABLE=1            switch on
    REMAP_CAPACITY=24GiB      weights, KV cache and ring together; required, but with vLLM, which has a default, and where the
                              arena is a broker's
    REMAP_SLOWDOWN=0.02       most stall per pass, as a share of the pass's computation
    REMAP_MAX_LAYERS=8        most layers that may be remapped (alpha)
    REMAP_MAX_TOKENS=65536    most tokens of the KV cache; by default as many as fit with max_layers remapped
    REMAP_RESERVE_BLOCKS=64   blocks kept free beyond the demand; by default derived from the demand's variation
    REMAP_PAGE_BYTES=2MiB     page size of the arena; by default chosen for the model (`footprint.Footprint.page_size`)
    REMAP_COPY_CHUNK_BYTES=32MiB  most bytes of one copy, so that the engine's own copies get in between; 0: any; by default
                              32 MiB on a GPU
    REMAP_BUFFERS=auto        ring buffers: 1, 2 or auto
    REMAP_LINK=24GB           bytes per second from host to device, used until copies have been measured
    REMAP_REVERSION=1         whether layers come home by themselves
    REMAP_SELECTION=nested    which layers stream: nested, uniform, slices or auto
    REMAP_CONTENTION=0.1      slowdown of the computation by a hidden copy, as a share of the copy's time
    REMAP_MAP_S=0.001         seconds to map a layer back
    REMAP_POLICY=priority     order in which idle models give pages: priority, mru, lru or expected_next_use; of engines that
                              share an arena the first one's is everybody's
    REMAP_MIN_IDLE=1          idle time before a model gives pages, as a multiple of the time that its reload is worth
    REMAP_RELOAD_S=0.1        most seconds by which a first prefill may be late because its model gave layers
    REMAP_TBT_S=0.05          target between two tokens: no growth lifts a decode pass above it; by default none
    REMAP_TTFT_S=1            target to the first token: requests wait so long rather than break REMAP_TBT_S; by default none
    REMAP_LENDS=1             whether other models may use this one's unused KV cache and layers
    REMAP_COLD_S=60           seconds without a request until an engine with a broker gives all of its layers' pages back; by
                              default when another engine needs them for its own layers (vLLM)
    REMAP_TURN_S=5            seconds that an engine serves, at least, before its requests pause for one of another process that
                              waits for pages for its layers; with REMAP_LENDS=0 they never do
    REMAP_CPU_LINEAR=exact    exact or packed: kernels of linear layers on a CPU (vLLM; see vllm/cpu_linear.py)
    REMAP_ARENA=shared        engines of one process that give the same name share one arena of REMAP_CAPACITY (vLLM)
    REMAP_ARENA=unix:PATH     engines of any process share the pages of the broker there (`remap serve --socket PATH --capacity
                              24GiB`); capacity and page size are the broker's; {device} in PATH: a rank's device (vLLM)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from remap.config import POLICIES, SELECTIONS, Knobs
from remap.errors import Error, InvalidArgument
from remap.joined import UNIX
from remap.moved import present
from remap.policy.turns import TURN_S
from remap.sizes import parse_size

__all__ = ["Settings", "enabled"]

_DEFAULTS = Knobs()
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def enabled(environment: Mapping[str, str]) -> bool:
    """Whether REMAP_ENABLE is set.

    Raises InvalidArgument (fields name, value) for a value that is neither yes nor no.
    """
    return _switch(environment, "REMAP_ENABLE", False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine's settings: sizes in bytes, slowdown as a share, reserve_blocks in KV blocks. See the list above.

    capacity: None where it is the broker's, until `arenas.join` has asked."""

    capacity: int | None
    slowdown: float = 0.02
    max_layers: int | None = None
    max_tokens: int | None = None
    reserve_blocks: int | None = None
    page_bytes: int | None = None
    copy_chunk_bytes: int | None = None
    buffers: int | Literal["auto"] = "auto"
    link: int | None = None
    reversion: bool = True
    arena: str = ""
    cpu_linear: Literal["exact", "packed"] = "exact"
    selection: str = _DEFAULTS.selection
    contention: float = _DEFAULTS.contention
    map_s: float = _DEFAULTS.map_s
    policy: str = _DEFAULTS.policy
    min_idle: float = _DEFAULTS.min_idle
    reload_s: float = _DEFAULTS.reload_s
    ttft_s: float | None = None
    tbt_s: float | None = None
    lends: bool = _DEFAULTS.lends
    cold_s: float | None = None
    turn_s: float = TURN_S

    @property
    def joins(self) -> bool:
        """Whether the arena is a broker's."""
        return self.arena.startswith(UNIX)

    @classmethod
    def read(cls, environment: Mapping[str, str], capacity: int | None = None) -> Settings | None:
        """The settings in `environment`, or None if it does not switch remap on. capacity: bytes, where neither REMAP_CAPACITY
        nor a broker says it.

        An empty variable counts as not set. Old names of variables work (`remap.moved`). Raises InvalidArgument (fields name:
        the variable, and value) for an invalid value, or if REMAP_CAPACITY is missing.
        """
        if not enabled(environment):
            return None
        environment = present(environment)
        arena = environment.get("REMAP_ARENA", "")
        if arena == UNIX:
            raise _refuse("REMAP_ARENA", arena, f"a name, or {UNIX}PATH with the socket of a broker")
        given = _size(environment, "REMAP_CAPACITY")
        if given is None and not arena.startswith(UNIX):
            given = capacity
        if given is None and not arena.startswith(UNIX):
            raise InvalidArgument(
                "REMAP_ENABLE is set but REMAP_CAPACITY is not; nothing was attached; set it to the bytes that weights "
                "and KV cache may take together, such as REMAP_CAPACITY=24GiB",
                name="REMAP_CAPACITY",
                value=None,
            )
        buffers = environment.get("REMAP_BUFFERS") or "auto"
        if buffers not in ("auto", "1", "2"):
            raise _refuse("REMAP_BUFFERS", buffers, "1, 2 or auto")
        linear = environment.get("REMAP_CPU_LINEAR") or "exact"
        if linear not in ("exact", "packed"):
            raise _refuse("REMAP_CPU_LINEAR", linear, "exact or packed")
        return cls(
            capacity=given,
            slowdown=_share(environment, "REMAP_SLOWDOWN", 0.02),
            max_layers=_count(environment, "REMAP_MAX_LAYERS", 0),
            max_tokens=_count(environment, "REMAP_MAX_TOKENS", 1),
            reserve_blocks=_count(environment, "REMAP_RESERVE_BLOCKS", 0),
            page_bytes=_size(environment, "REMAP_PAGE_BYTES"),
            copy_chunk_bytes=_chunk(environment),
            buffers="auto" if buffers == "auto" else int(buffers),
            link=_size(environment, "REMAP_LINK"),
            reversion=_switch(environment, "REMAP_REVERSION", True),
            arena=arena,
            cpu_linear="packed" if linear == "packed" else "exact",
            selection=_choice(environment, "REMAP_SELECTION", SELECTIONS, _DEFAULTS.selection),
            contention=_share(environment, "REMAP_CONTENTION", _DEFAULTS.contention),
            map_s=_share(environment, "REMAP_MAP_S", _DEFAULTS.map_s),
            policy=_choice(environment, "REMAP_POLICY", POLICIES, _DEFAULTS.policy),
            min_idle=_share(environment, "REMAP_MIN_IDLE", _DEFAULTS.min_idle),
            reload_s=_share(environment, "REMAP_RELOAD_S", _DEFAULTS.reload_s),
            ttft_s=_target(environment, "REMAP_TTFT_S"),
            tbt_s=_target(environment, "REMAP_TBT_S"),
            lends=_switch(environment, "REMAP_LENDS", _DEFAULTS.lends),
            cold_s=_target(environment, "REMAP_COLD_S"),
            turn_s=_share(environment, "REMAP_TURN_S", TURN_S),
        )

    def controller(self) -> Knobs:
        """The controller's part of these settings."""
        return Knobs(
            slowdown=self.slowdown,
            reserve_blocks=self.reserve_blocks,
            max_layers=self.max_layers,
            buffers=self.buffers,
            reversion=self.reversion,
            selection=self.selection,
            contention=self.contention,
            map_s=self.map_s,
            policy=self.policy,
            min_idle=self.min_idle,
            reload_s=self.reload_s,
            ttft_s=self.ttft_s,
            tbt_s=self.tbt_s,
            lends=self.lends,
        )


def _refuse(name: str, value: str, expected: str) -> InvalidArgument:
    shown = repr(value) if len(value) <= 100 else f"{value[:60]!r}... ({len(value)} characters)"
    return InvalidArgument(
        f"{name} must be {expected}, got {shown}; nothing was attached; correct it or unset it",
        name=name,
        value=value,
    )


def _switch(environment: Mapping[str, str], name: str, default: bool) -> bool:
    value = environment.get(name)
    if value is None:
        return default
    if value.lower() not in (*_YES, *_NO):
        raise _refuse(name, value, "1 or 0")
    return value.lower() in _YES


def _choice(environment: Mapping[str, str], name: str, known: tuple[str, ...], default: str) -> str:
    value = environment.get(name) or default
    if value not in known:
        raise _refuse(name, value, f"one of {', '.join(known)}")
    return value


def _count(environment: Mapping[str, str], name: str, least: int) -> int | None:
    value = environment.get(name)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 19 and int(value) >= least):
        raise _refuse(name, value, f"an int of at least {least}")
    return int(value)


def _chunk(environment: Mapping[str, str]) -> int | None:
    return 0 if environment.get("REMAP_COPY_CHUNK_BYTES") == "0" else _size(environment, "REMAP_COPY_CHUNK_BYTES")


def _size(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if not value:
        return None
    expected = "a number of bytes above 0, or text such as 24GiB"
    try:
        size = parse_size(value, name)
    except Error as error:
        raise _refuse(name, value, expected) from error
    if size == 0:
        raise _refuse(name, value, expected)
    return size


def _target(environment: Mapping[str, str], name: str) -> float | None:
    seconds = _share(environment, name, 0.0)
    if environment.get(name) and seconds == 0.0:
        raise _refuse(name, environment[name], "a finite number of seconds above 0")
    return seconds or None


def _share(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name)
    if not value:
        return default
    try:
        share = float(value)
    except ValueError as error:
        raise _refuse(name, value, "a number of at least 0") from error
    if not 0 <= share < float("inf"):
        raise _refuse(name, value, "a finite number of at least 0")
    return share

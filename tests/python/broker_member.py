"""A member of a broker in a process of its own, told what to do a line at a time:
`python broker_member.py SOCKET NAME LAYERS VALUE`.

With more than `LAYERS` layers its weights give pages, too. All bytes of its blocks are VALUE, 1 to 255. On a GPU it reads and
writes by copies (tests/gpu/test_gpu_broker.py)."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from arena_worlds import make_spec

import remap
from remap.errors import OutOfMemory
from remap.internals import internals

if TYPE_CHECKING:
    from remap.broker.server import Broker

LAYERS, LAYER_PAGES, PAGE = 4, 2, int(os.environ.get("REMAP_TEST_PAGE", 1 << 16))
DIM = 32 * PAGE >> 16  # so that a page has as many blocks, whatever its size
WHOLE = range(0, LAYER_PAGES * PAGE, PAGE)  # where pages of a layer begin
VALUES = {"one": 1, "two": 2, "three": 3}


def opened(broker: Broker) -> remap.Session:
    return remap.Session(device=f"unix:{broker.path}")


def attached(session: remap.Session, name: str) -> remap.Tenant:
    masters = [np.full(LAYER_PAGES * PAGE, layer, dtype=np.uint8) for layer in range(LAYERS)]
    knobs = remap.advanced.Knobs(reserve_blocks=0, max_layers=0)
    return session.attach_bytes(masters, name=name, kv=make_spec(LAYERS, min_blocks=8, max_blocks=4000), config=knobs)


def until(holds: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Waits for what other threads and processes do. what: that it was; if it is called, how things are."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what if isinstance(what, str) else what()
        time.sleep(0.005)


def files_of(pid: int) -> list[str]:
    """What the descriptors of a process are of."""
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(file.readlink()))
    return sorted(found)


def arena_maps(pid: int) -> list[str]:
    """The maps of a host's arena in a process."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "remap-pages" in line]


class Process:
    """The other side of `listen`. program: this file, or one that goes on with it."""

    def __init__(self, path: str, name: str, layers: int = LAYERS, value: int = 0, program: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, program or __file__, path, name, str(layers), str(value or VALUES[name])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },  # a program of tests/serve imports this
        )
        assert self.read() == "ready"

    def __call__(self, *line: object) -> str:
        self.begin(*line)
        return self.read()

    def begin(self, *line: object) -> None:
        """Without waiting for the answer, which `read` gives."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, line)) + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def state(self) -> str:
        """As the kernel says it: "T" is stopped."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait(timeout=60)


class Member:
    """A session with one tenant. Every block that it has taken has the process's own value in all bytes."""

    def __init__(self, path: str, name: str, layers: int, value: int) -> None:
        self.name, self.value = name, value
        self.files = len(files_of(os.getpid()))
        self.masters = [
            np.random.default_rng(self.value * 100 + layer).integers(0, 256, LAYER_PAGES * PAGE - 77, dtype=np.uint8)
            for layer in range(layers)
        ]
        self.session = remap.Session(device=f"unix:{path}")
        knobs = remap.advanced.Knobs(reserve_blocks=0, max_layers=0 if layers == LAYERS else None)
        self.tenant = self.session.attach_bytes(self.masters, name=name, kv=self._spec(layers), config=knobs)
        self.blocks: list[int] = []
        self.memory = SessionBytes(self.session)

    def _spec(self, layers: int) -> remap.KVSpec:
        return make_spec(layers, min_blocks=8, max_blocks=4000, dim=DIM)

    def take(self, blocks: int, least: int = -1) -> str:
        """Step until it has so many blocks; none has bytes of another process, and each is written. least: so many come for
        certain (default: all), and then it tries some times more."""
        kv, tries = self.tenant.kv, 0
        while kv.free_blocks < blocks and tries < 100:
            self._step(blocks)
            tries += 0 <= least <= kv.free_blocks
            time.sleep(0.01)
        got = kv.allocate(min(blocks, kv.free_blocks))
        for block in got:
            found = self._read(block)
            if not found <= {0, self.value} and not self._own(block):
                return f"block {block} has bytes {found} of another process"
            for address, nbytes in self.ranges(block):
                self.memory.fill(address, nbytes, self.value)
        self.blocks += got
        return str(len(got))

    def ranges(self, block: int) -> list[tuple[int, int]]:
        kv = internals(self.tenant).kv
        return [(kv.address + offset, nbytes) for offset, nbytes in kv.geometry.byte_ranges_of_block(block)]

    def _read(self, block: int) -> set[int]:
        found = b"".join(self.memory.read(address, nbytes) for address, nbytes in self.ranges(block))
        return set(np.flatnonzero(np.bincount(np.frombuffer(found, dtype=np.uint8))).tolist())

    def _own(self, block: int) -> bool:
        """Whether it has what the tenant's own layers left in these pages: such pages stay as they are."""
        base = internals(self.tenant).kv.address
        for address, nbytes in self.ranges(block):
            end = address + nbytes
            while address < end:
                at = (address - base) % PAGE
                found = self.memory.read(address, min(PAGE - at, end - address))
                if not (set(found) <= {0, self.value} or any(self._begins(found, page + at) for page in WHOLE)):
                    return False
                address += len(found)
        return True

    def _begins(self, found: bytes, at: int) -> bool:
        """Whether some layer has these bytes from there on. Behind its end anything of the tenant's own may stand."""
        left = max(0, LAYER_PAGES * PAGE - 77 - at)
        return set(found[left:]) <= {0, self.value} and any(
            each[at : at + len(found)].tobytes() == found[:left] for each in self.masters
        )

    def thin(self) -> str:
        """Free every other block."""
        self.tenant.kv.free(self.blocks[::2])
        self.blocks = self.blocks[1::2]
        return "thinned"

    def free(self) -> str:
        """All blocks; and say that nothing is wanted, until that is believed."""
        self.tenant.kv.free(self.blocks)
        self.blocks = []
        for _ in range(200):
            self._step(0)
        return "freed"

    def check(self) -> str:
        """Whether all bytes that it has are its own: blocks and weights."""
        remap.advanced.check(self.session)
        if not self.tenant.active:
            return "asleep"
        for block in self.blocks:
            if self._read(block) != {self.value}:
                return f"block {block} was overwritten"
        with self.tenant.forward():
            for layer, master in enumerate(self.masters):
                self.tenant.wait(layer)
                address = remap.advanced.layer_address(self.session, self.name, layer)
                if self.memory.read(address, len(master)) != master.tobytes():
                    return f"layer {layer} was overwritten"
                self.tenant.done(layer)
        return "right"

    def sleep(self) -> str:
        self.session.deactivate(self.name)
        return "asleep"

    def cold(self) -> str:
        """As `sleep`, and its layers have no pages."""
        self.session.deactivate(self.name, pages="none")
        return "asleep"

    def wake(self) -> str:
        """Whether it is active, layers that came home, and that still stream. "cold": there are no pages for them."""
        try:
            report = self.session.activate(self.name)
        except OutOfMemory as error:
            return f"cold {error}"
        self._follow(report.moved)
        why = "" if report.activated else f" {report.reason}"
        return f"{report.activated} {len(report.restored)} {len(report.streamed)}{why}"

    def idle(self) -> str:
        """As if its last pass were long ago."""
        internals(self.tenant)._state.last_pass_s = -1e9
        return "idle"

    def step(self) -> str:
        """How many blocks moved."""
        return str(self._step(0))

    def _step(self, blocks: int) -> int:
        if not self.tenant.active:
            return 0
        return self._follow(self.session.step({self.name: remap.Demand(blocks)}).moved)

    def _follow(self, moves: Mapping[str, Mapping[int, int]]) -> int:
        moved = moves.get(self.name, {})
        self.blocks = [moved.get(block, block) for block in self.blocks]
        return len(moved)

    def gone(self) -> str:
        """Pages of its layers that others have; and layers that stream."""
        state = internals(self.tenant)._state
        return f"{len(state.gone)} {len(state.streamed)}"

    def problem(self) -> str:
        """Why no broker answers."""
        assert self.session._other_processes is not None
        return self.session._other_processes.problem or "none"

    def short(self) -> str:
        """Why a step that lacks blocks does not get them."""
        return self.session.step({self.name: remap.Demand(100_000)}).reason[self.name]

    def more(self) -> str:
        """One more model, which needs more than there is."""
        self.session.attach_bytes([np.zeros(PAGE * 4096, dtype=np.uint8)] * 2, name="more", kv=make_spec(2))
        return "attached"

    def fork(self) -> str:
        """A child that outlives this process, and whose end of a pipe the test has. Its number."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return str(child)

    def usable(self) -> str:
        return str(self.tenant.kv.usable_blocks)

    def close(self) -> str:
        self.session.close()
        return "closed"

    def left(self) -> str:
        """Descriptors more than before there was a session, and maps of its arena. Nothing refers to it any more: its backend
        has the arena's file for as long."""
        del self.session, self.tenant, self.memory
        gc.collect()
        return f"{len(files_of(os.getpid())) - self.files} {len(arena_maps(os.getpid()))}"


class SessionBytes:
    """A session's memory, read and written at once."""

    def __init__(self, session: remap.Session) -> None:
        self._backend = session._backend
        self.here = session._device.host_addressable
        self._stream = 0 if self.here else self._backend.create_stream()

    def read(self, address: int, nbytes: int) -> bytes:
        if self.here:
            return ctypes.string_at(address, nbytes)
        host = self._backend.allocate_host(nbytes)
        self._backend.copy(self._stream, host, address, nbytes)
        self._wait()
        found = ctypes.string_at(host, nbytes)
        self._backend.free_host(host, nbytes)
        return found

    def fill(self, address: int, nbytes: int, value: int) -> None:
        if self.here:
            ctypes.memset(address, value, nbytes)
            return
        self._backend.fill(self._stream, address, value, nbytes)
        self._wait()

    def _wait(self) -> None:
        event = self._backend.create_event(timed=False)
        self._backend.record(event, self._stream)
        assert self._backend.synchronize(event, 60.0)
        self._backend.destroy_event(event)


def listen(kind: type[Member], path: str, name: str, layers: str, value: str) -> None:
    """Do what the lines of the input say."""
    member = kind(path, name, int(layers), int(value))
    say("ready")
    for line in FileIO(0):  # no more is read than a line, so that one that waits can be seen
        verb, *numbers = line.decode().split()
        try:
            said = getattr(member, verb)(*map(int, numbers))
        except (remap.Error, AssertionError) as error:  # for the test to show
            said = f"{type(error).__name__}: {error}"
        say(said)


def say(text: str) -> None:
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    listen(Member, *sys.argv[1:])

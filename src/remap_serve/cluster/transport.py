# SPDX-License-Identifier: Apache-2.0
"""Messages and tensors between the instances of a group or of a change, over torch.distributed's gloo process groups.

A `GroupLink` is one process group of its own: made from a store and a prefix, never the default group. A message is
a header of bytes (wire.py), and perhaps a tensor. Nothing is pickled.

What ends a wait: the message, the end of the peer's process (its connections close), or the peer's own `close`, which says so
to all peers first. gloo cannot give up a receive without breaking the connection, so a receive has no time limit; a peer
that lives and is silent is for the control plane to find. A send has one: a peer that takes no message for so long is as good
as gone.

Threads: `post` never waits: one daemon thread of the link sends, in the order of posting, and one for each peer that is
listened to receives from it. They call `deliver`, `then` and `lost`, which only enqueue (instance_loop.py).

None of them may wait in gloo while the interpreter ends: one that wakes then asks for the GIL inside a C++ destructor, and the
process aborts (pytorch#38228). So at exit their connections are broken, and they are joined.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from remap.errors import Error, InvalidArgument
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.pipeline import Network

__all__ = ["ASSUMED", "FRAME", "Deliver", "GroupLink", "PeerLost", "ServedStore", "bytes_of", "connect", "tensor_of"]

LOG = logging.getLogger(__name__)

FRAME = 4096
"""Bytes of the first part of each message: two lengths, and as much of the header as fits."""

ASSUMED = Network(Line(5e-4, 0.0), 2e9)
"""The assumed times of gloo over loopback, where no argument says otherwise, until pieces have shown what it brings
(`throughput`). It decides what to move, and so speed alone."""

_c10d: Any = dist  # torch's annotations do not export what its documentation names

_FOREVER = timedelta(days=3650)

LEAVE_S = 1.0
"""For so long the interpreter's end waits for each thread of a link."""

_senders: dict[threading.Thread, Callable[[], None]] = {}  # and what ends each
_listeners: dict[threading.Thread, tuple[dist.ProcessGroup, int]] = {}  # and to whom each listens
_ending: set[threading.Thread] = set()  # those that are in neither any more; some still take their process group down

Deliver = Callable[[int, bytes, torch.Tensor | None], None]


class _Outgoing(NamedTuple):
    """A message that was posted; without a header the last one, a farewell."""

    to: int
    header: bytes
    payload: torch.Tensor | None
    then: Callable[[float], None] | None


class PeerLost(Error):
    """An instance that this one waits for ended, or takes no messages. Nothing more comes from it.

    Fields: peer (its name), link (the prefix of the process group).
    """


class GroupLink:
    """One process group. names: of the members, in the order of their ranks. Nothing is sent or received before `open`."""

    def __init__(self, group: dist.ProcessGroup, prefix: str, names: Sequence[str], rank: int) -> None:
        self.names = tuple(names)
        self.rank = rank
        self._prefix = prefix
        # The link's threads keep references of their own: connections close when the last of them has ended.
        self._group: dist.ProcessGroup | None = group
        self._outbox: SimpleQueue[_Outgoing | None] = SimpleQueue()
        self._closed = threading.Event()
        self._listeners: list[int] = []

    def open(
        self, sources: Iterable[int], listeners: Iterable[int], deliver: Deliver, lost: Callable[[PeerLost], None]
    ) -> None:
        """From now on hand each message of these members to deliver(source, header, payload), in the order of sending, and send
        the posted messages. listeners: the peers that listen to this one. lost(error): for each that is gone. `close` ends
        both."""
        group = self._group
        if group is None:
            return
        self._listeners = list(listeners)
        for source in sources:
            self._start(_listeners, (group, source), self._listen, group, source, deliver, lost)
        self._start(_senders, self._stop, self._send, group, lost)

    def post(
        self,
        to: int,
        header: bytes,
        payload: torch.Tensor | None = None,
        then: Callable[[float], None] | None = None,
    ) -> None:
        """Send to the member with this rank, behind all posted before. payload: uint8, one dimension; it must not change.
        then(seconds): it has left, which took so long. After `close`, or when the peer is gone, nothing is sent."""
        self._outbox.put(_Outgoing(to, header, payload, then))

    def close(self) -> None:
        """Tell the listeners that nothing comes after the posted messages, and go. Does not wait, raises nothing; a second call
        does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        for to in self._listeners:
            self._outbox.put(_Outgoing(to, b"", None, None))
        self._stop()

    def _stop(self) -> None:
        """Send nothing behind the posted messages, and call no callback any more."""
        self._closed.set()
        self._outbox.put(None)

    def _start(
        self, running: dict[threading.Thread, Any], entry: object, target: Callable[..., None], *args: object
    ) -> None:
        """In a thread that is in `running` until it ends."""

        def run() -> None:
            try:
                target(*args)
            finally:
                _ending.add(threading.current_thread())
                running.pop(threading.current_thread(), None)

        _ending.difference_update([each for each in tuple(_ending) if not each.is_alive()])
        thread = threading.Thread(target=run, name=f"{self._prefix} {self.names[self.rank]}", daemon=True)
        running[thread] = entry
        thread.start()

    def _send(self, group: dist.ProcessGroup, lost: Callable[[PeerLost], None]) -> None:
        gone: set[int] = set()
        while (message := self._outbox.get()) is not None:
            if message.to in gone:
                continue
            begin = time.perf_counter()
            try:
                for part in _parts(message.header, message.payload):
                    group.send([part], message.to, 0).wait()
            except RuntimeError as error:  # gloo has no types of its own: whatever it was, the connection is broken
                gone.add(message.to)
                self._tell(message.to, error, lost)
            else:
                if message.then is not None:
                    message.then(time.perf_counter() - begin)

    def _tell(self, rank: int, error: RuntimeError, lost: Callable[[PeerLost], None]) -> None:
        if self._closed.is_set():
            return  # it ended as well, perhaps sooner
        found = PeerLost(
            f"{self.names[rank]!r} is gone, or takes no messages ({self._prefix}); messages in flight are lost; recover",
            peer=self.names[rank],
            link=self._prefix,
        )
        found.__cause__ = error
        lost(found)

    def _listen(
        self, group: dist.ProcessGroup, source: int, deliver: Deliver, lost: Callable[[PeerLost], None]
    ) -> None:
        def received(size: int) -> torch.Tensor:
            part = torch.empty(size, dtype=torch.uint8)
            group.recv([part], source, 0).wait(_FOREVER)
            return part

        try:
            while True:
                frame = received(FRAME).numpy().tobytes()
                length, nbytes = int.from_bytes(frame[:8], "little"), int.from_bytes(frame[8:16], "little")
                if not length:
                    break
                header = frame[16 : 16 + length]
                if len(header) < length:
                    header += received(length - len(header)).numpy().tobytes()
                payload = received(nbytes) if nbytes else None
                if self._closed.is_set():
                    continue  # until the peer says good-bye: else its send would wait for a receiver
                deliver(source, header, payload)
        except RuntimeError as error:
            self._tell(source, error, lost)


class ServedStore:
    """Where instances find each other: a torch.distributed.TCPStore, which lives as long as this object and listens at `host`
    alone. address: of it, "host:port/space".

    A process that reaches the port may write to it. Keys of instances begin with `space`, which no other uses by accident; all
    others are left alone. That keeps foreign keys apart, and keeps no process out: one that asks for the keys sees it. Nor does
    it bound what foreign keys take: the store has no limit, and its contents are this process's memory until it ends.
    """

    def __init__(self, host: str) -> None:
        # By itself it would listen at every address of the machine.
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listening.getsockname()[1]
        self._store = _c10d.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._space = secrets.token_hex(16)
        self.address = f"{host}:{port}/{self._space}"

    def forget(self, epoch: int) -> None:
        """Keep nothing of changes before this epoch: an instance that is still to come is too late. Behind the space, keys begin
        with their epoch. Raises nothing: keys that stay are memory, and no change depends on it."""
        try:
            for key in self._store.list_keys():
                space, _, rest = key.partition("/")
                old = rest.partition("/")[0]
                if space == self._space and old.isdecimal() and int(old) < epoch:
                    self._store.delete_key(key)
        except (
            RuntimeError,
            ValueError,
        ) as error:  # the store's own; a foreign key that is no text, or a number too long
            LOG.warning(
                "keys of changes before epoch %d stay in the rendezvous %s: %s", epoch, self.address[:-33], error
            )


def connect(address: str, prefix: str, names: Sequence[str], name: str, host: str, timeout_s: float) -> GroupLink:
    """The link of these members, of whom each calls this. Waits for all.

    address: "host:port" of a torch.distributed.TCPStore, or "host:port/space" for keys that begin with a space.
    host: this member's, at which it listens. timeout_s: for all to come,
    and later for a send. Raises InvalidArgument (field address) for an address that is none; PeerLost (fields peer: "", link)
    if not all came, or at once if no process is at the address.
    """
    server, slash, space = address.partition("/")
    at, _, port = server.rpartition(":")
    if not at or not port.isdigit():
        raise InvalidArgument(
            f"a rendezvous is 'host:port' of a store, got {address!r}; nothing was made", address=address
        )
    limit, rank = timedelta(seconds=timeout_s), names.index(name)
    end_s = time.monotonic() + timeout_s
    try:
        # A store whose process is gone refuses this; torch would try again and again, beyond its time limit.
        socket.create_connection((at, int(port)), timeout_s).close()
        store = _c10d.PrefixStore(space + slash + prefix, _c10d.TCPStore(at, int(port), is_master=False, timeout=limit))
        # gloo waits for one member after another, for so long each: so all have to be there before.
        store.set(f"here/{rank}", "")
        store.wait(
            [f"here/{other}" for other in range(len(names))], timedelta(seconds=max(0.001, end_s - time.monotonic()))
        )
        options = _c10d.ProcessGroupGloo._Options()  # noqa: SLF001  # it has no other name
        # By itself gloo takes the address of the machine's name, which others may not reach.
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._timeout = limit  # noqa: SLF001
        group = _c10d.ProcessGroupGloo(store, rank, len(names), options)
    except (OSError, RuntimeError) as error:
        raise PeerLost(
            f"not all of {', '.join(names)} came to {address} ({prefix}) within {timeout_s} s; nothing changed; plan anew",
            peer="",
            link=prefix,
        ) from error
    return GroupLink(group, prefix, names, rank)


@atexit.register
def _end_threads() -> None:
    """Before the interpreter ends (see the module)."""
    for thread, stop in list(_senders.items()):
        stop()
        thread.join(LEAVE_S)
    for thread, (group, source) in list(_listeners.items()):
        # gloo breaks the connections of a receive whose time is over, and so ends the thread's receive as well.
        with suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], source, 1).wait(timedelta(milliseconds=1))
        thread.join(LEAVE_S)
    for thread in tuple(_ending):
        thread.join(LEAVE_S)


def _parts(header: bytes, payload: torch.Tensor | None) -> list[torch.Tensor]:
    """The parts sent for a message, one after another."""
    nbytes = 0 if payload is None else payload.numel()
    frame = bytearray(FRAME)
    frame[:8], frame[8:16] = len(header).to_bytes(8, "little"), nbytes.to_bytes(8, "little")
    first, rest = header[: FRAME - 16], header[FRAME - 16 :]
    frame[16 : 16 + len(first)] = first
    parts = [torch.frombuffer(frame, dtype=torch.uint8)]
    if rest:
        parts.append(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
    if payload is not None and nbytes:
        parts.append(payload)
    return parts


def bytes_of(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int], str]:
    """(its bytes, shape, dtype): what `tensor_of` makes it from."""
    whole = tensor.contiguous()
    return whole.view(torch.uint8).flatten(), list(whole.shape), str(whole.dtype).removeprefix("torch.")


def tensor_of(payload: torch.Tensor, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The inverse of `bytes_of`; shares the bytes."""
    return payload.view(getattr(torch, dtype)).view(*shape)

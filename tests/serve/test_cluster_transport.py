"""Links between threads of one process and between processes: order, sizes, ends, and peers that die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import torch.distributed as dist  # noqa: E402

from remap.errors import InvalidArgument  # noqa: E402
from remap_serve.cluster import transport  # noqa: E402
from remap_serve.cluster.transport import FRAME, GroupLink, PeerLost, ServedStore, bytes_of, connect, tensor_of  # noqa: E402

LIMIT_S = 60.0
HOST = "127.0.0.1"


@pytest.fixture
def address():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"127.0.0.1:{store.port}"
    del store


def links(address, prefix, names) -> list[GroupLink]:
    found: dict[str, GroupLink] = {}

    def join(name):
        found[name] = connect(address, prefix, names, name, HOST, LIMIT_S)

    threads = [threading.Thread(target=join, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[name] for name in names]


def test_messages_come_whole_and_in_order_from_everybody(address):
    three = links(address, "t", ["a", "b", "c"])
    inbox: Queue = Queue()
    three[0].open((1, 2), (), lambda *message: inbox.put(message), inbox.put)
    sizes = [1, FRAME - 17, FRAME - 16, FRAME - 15, 3 * FRAME]
    sent = {
        rank: [(bytes([rank + 1]) * size, torch.full((size % 7,), rank, dtype=torch.uint8)) for size in sizes]
        for rank in (1, 2)
    }
    left: Queue = Queue()
    for rank, messages in sent.items():
        three[rank].open((), [0], lambda *message: None, inbox.put)
        for header, payload in messages:
            three[rank].post(0, header, payload, lambda seconds, rank=rank: left.put(rank))
    got: dict[int, list] = {1: [], 2: []}
    for _ in range(2 * len(sizes)):
        source, header, payload = inbox.get(timeout=LIMIT_S)
        got[source].append((header, payload))
    for rank, messages in sent.items():
        for (header, payload), (its, tensor) in zip(messages, got[rank], strict=True):
            assert header == its
            assert torch.equal(payload, tensor) if payload.numel() else tensor is None
    assert sorted(left.get(timeout=LIMIT_S) for _ in range(2 * len(sizes))) == [1] * len(sizes) + [2] * len(sizes)
    three[1].close()
    three[1].close()
    three[1].post(0, b"too late")
    three[2].post(0, b"last")
    assert inbox.get(timeout=LIMIT_S)[1] == b"last"
    three[2].close()
    three[0].close()
    assert inbox.empty()  # an end that was announced is no loss


def test_tensors_keep_shape_and_type():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = torch.arange(24).to(dtype).view(2, 3, 4).transpose(0, 2)
        payload, shape, name = bytes_of(tensor)
        assert payload.dtype is torch.uint8 and payload.dim() == 1
        assert torch.equal(tensor_of(payload, shape, name), tensor)


def test_who_does_not_come_is_named_and_nothing_is_left(address):
    with pytest.raises(PeerLost) as lost:
        connect(address, "late", ["a", "b"], "a", HOST, 1.0)
    assert lost.value.link == "late"
    for bad in ("nowhere", "host:", ":1", "host:port"):
        with pytest.raises(InvalidArgument) as refused:
            connect(bad, "x", ["a", "b"], "a", HOST, 1.0)
        assert refused.value.address == bad


def test_a_store_listens_at_its_host_alone_and_members_at_theirs():
    store = ServedStore(HOST)
    port = client_of(store).port
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), LIMIT_S)
    found: dict[str, GroupLink] = {}

    def join(name: str, host: str) -> None:
        found[name] = connect(store.address, "hosts", ["a", "b"], name, host, LIMIT_S)

    threads = [threading.Thread(target=join, args=each) for each in (("a", "127.0.0.2"), ("b", "127.0.0.3"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for address in ("127.0.0.2", "127.0.0.3"):
        assert f" {socket.inet_aton(address)[::-1].hex().upper()}:" in Path("/proc/net/tcp").read_text()
    inbox: Queue = Queue()
    found["a"].open([1], [], lambda *message: inbox.put(message), inbox.put)
    found["b"].open([], [0], inbox.put, inbox.put)
    found["b"].post(0, b"hello")
    assert inbox.get(timeout=LIMIT_S) == (1, b"hello", None)
    for link in found.values():
        link.close()


def client_of(store: ServedStore) -> dist.TCPStore:
    return dist.TCPStore(HOST, int(store.address.partition("/")[0].rpartition(":")[2]), is_master=False)


@pytest.mark.parametrize("key", ["junk", "7/mesh", "", "/", "7", "x/7", "²/7", b"\xff\xfe"])
def test_foreign_keys_and_foreign_connections_end_no_store(key):
    store = ServedStore(HOST)
    host, port = store.address.partition("/")[0].rsplit(":", 1)
    client = client_of(store)
    space = store.address.partition("/")[2]
    for foreign in (key, f"{space}/junk", f"{space}/{'9' * 5000}"):
        client.set(foreign, "x")
    for garbage in (b"\xff" * 1000, b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(garbage)
    store.forget(10)
    assert client.get(key) == b"x"  # it is not ours
    for link in links(store.address, "11/mesh", ["a", "b"]):
        link.close()


def test_a_store_forgets_what_changes_that_are_over_left_in_it():
    store = ServedStore(HOST)
    for epoch in (7, 8, 10):
        for link in links(store.address, f"{epoch}/mesh", ["a", "b"]):
            link.close()
    client = client_of(store)
    assert {key.split("/")[1] for key in client.list_keys()} >= {"7", "8", "10"}
    store.forget(10)
    assert {key.split("/")[1] for key in client.list_keys()} == {"10"}
    for link in links(store.address, "11/mesh", ["a", "b"]):
        link.close()


def test_a_store_whose_process_is_gone_is_lost_at_once_and_leaves_no_thread():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    before = threading.enumerate()
    with pytest.raises(PeerLost) as lost:
        connect(address, "dead", ["a", "b"], "a", HOST, 3600.0)
    assert lost.value.link == "dead" and threading.enumerate() == before


CHILD = """
import sys
from remap_serve.cluster.transport import connect
link = connect(sys.argv[1], "kill", ["a", "b", "c"], sys.argv[2], "127.0.0.1", 60.0)
link.open([0], [0], lambda source, header, payload: link.post(0, header), lambda error: None)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_killed_ends_every_wait(address):
    children = {
        name: subprocess.Popen(
            [sys.executable, "-c", CHILD, address, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
        )
        for name in ("b", "c")
    }
    try:
        link = connect(address, "kill", ["a", "b", "c"], "a", HOST, LIMIT_S)
        inbox: Queue = Queue()
        link.open((1, 2), (1, 2), lambda *message: inbox.put(message), inbox.put)
        link.post(1, b"hello")
        assert inbox.get(timeout=LIMIT_S)[:2] == (1, b"hello")
        children["b"].send_signal(signal.SIGKILL)
        lost = inbox.get(timeout=LIMIT_S)
        assert isinstance(lost, PeerLost) and (lost.peer, lost.link) == ("b", "kill")
        link.post(1, b"still there?")
        again = inbox.get(timeout=LIMIT_S)
        assert isinstance(again, PeerLost) and again.peer == "b"
        link.post(2, b"and you?")  # the others are not concerned
        assert inbox.get(timeout=LIMIT_S)[:2] == (2, b"and you?")
        link.close()
    finally:
        for child in children.values():
            child.kill()
            child.communicate()


PEER = """
import os, sys
from remap_serve.cluster.transport import connect
link = connect(sys.argv[1], "leave", ["a", "b"], "b", "127.0.0.1", 60.0)
link.open([0], [0], lambda *message: None, lambda error: None)
sys.stdin.read()
os._exit(0)
"""

LEAVING = """
import subprocess, sys, time
import torch.distributed as dist
from remap_serve.cluster.transport import connect
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
address = f"127.0.0.1:{store.port}"
peer = subprocess.Popen([sys.executable, "-c", sys.argv[1], address], stdin=subprocess.PIPE)
link = connect(address, "leave", ["a", "b"], "a", "127.0.0.1", 60.0)
link.open([1], [1], lambda *message: None, lambda error: None)
time.sleep(0.5)  # until it listens, or this would show nothing
link.close()

class Late:
    def __init__(self):
        self.kill, self.wait, self.sleep = peer.kill, peer.wait, time.sleep
    def __del__(self):  # when the interpreter is ending: the peer's death wakes who still listens
        self.kill(), self.wait(), self.sleep(1.0)

sys.late = Late()
"""


def test_the_interpreter_ends_well_though_peers_die_meanwhile():
    """A thread that waited in gloo then would abort the process."""
    leaving = subprocess.run([sys.executable, "-c", LEAVING, PEER], env=os.environ, timeout=LIMIT_S)
    assert leaving.returncode == 0


def test_a_thread_that_has_nothing_more_to_do_is_known_until_it_has_ended():
    """What it was given goes with it, a process group perhaps, which takes a while."""
    begin, go = threading.Event(), threading.Event()

    class Slow:
        def __del__(self):
            go.wait(LIMIT_S)

    running = {}
    link = SimpleNamespace(_prefix="ends", names=("a",), rank=0)
    transport.GroupLink._start(link, running, None, lambda given: begin.wait(LIMIT_S), Slow())
    begin.set()  # from here on the thread alone has it
    while running:
        time.sleep(0.001)
    (thread,) = [each for each in transport._ending if each.name == "ends a"]
    assert thread.is_alive()
    go.set()
    transport._end_threads()
    assert not thread.is_alive()

"""Why an instance died: what is said of its process, that it does not come back, and which folders Ray leaves."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from control_worlds import description
from ray.exceptions import ActorDiedError, ActorUnavailableError
from test_cluster_front import until

from remap_serve.cluster import ray_cluster, ray_sessions
from remap_serve.cluster.ends import ProcessEnd, last_words
from remap_serve.cluster.front import Lost
from remap_serve.cluster.ray_cluster import RayConnection

TELLS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)
"""Whether this kernel says how a process ended that is another's child."""


class Actor:
    """An instance's actor, as Ray shows it. answers: what its calls give, one after another, and the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.call = SimpleNamespace(remote=self.remote)

    async def remote(self, method: str, arguments: object) -> Any:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return "ok", found


AWAY = ActorUnavailableError("RpcError: Socket closed", b"\0" * 16)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """It writes to err.txt, and does what its input says."""
    program = "import faulthandler; faulthandler.enable(); print('ready', flush=True); exec(input())"
    with open(tmp_path / "err.txt", "wb") as log:
        made = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert made.stdout is not None and made.stdout.readline()
    yield made
    made.kill()
    made.wait()
    assert made.stdin is not None
    made.stdin.close()
    made.stdout.close()


@pytest.mark.parametrize(
    ("does", "known", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ("SIGKILL", None), ""),
        ("import ctypes; ctypes.string_at(0)", ("SIGSEGV", None), "Fatal Python error: Segmentation fault"),
        ("raise SystemExit('no room for weights')", (None, 1), "no room for weights"),
    ],
)
def test_a_dead_instance_is_told_with_its_signal_or_code_and_its_log(
    process: subprocess.Popen[bytes], tmp_path: Path, does: str, known: tuple[Any, Any], says: str
) -> None:
    """Of an instance that had died all that was said was what Ray says: that a socket was closed."""
    log = str(tmp_path / "err.txt")
    described = replace(description("a"), pid=process.pid, node="10.0.0.7", log=log)
    connection: Any = RayConnection("a", Actor(described, AWAY))

    async def run() -> Lost:
        await connection.call("describe")
        assert process.stdin is not None
        process.stdin.write(does.encode() + b"\n")
        process.stdin.flush()
        while process.poll() is None:
            await asyncio.sleep(0.01)
        with pytest.raises(Lost) as caught:
            await connection.call("poll")
        connection.end()
        return caught.value

    lost: Any = asyncio.run(run())
    assert (lost.returns, lost.outside, lost.pid, lost.node, lost.log) == (True, False, process.pid, "10.0.0.7", log)
    assert (lost.signal, lost.exit_code) == (known if TELLS else (None, None))
    assert f"process {process.pid} on 10.0.0.7" in str(lost) and log in lost.why and lost.why in str(lost)
    assert says in lost.why
    if TELLS:
        assert str(known[0] or f"exit code {known[1]}") in lost.why


def test_a_process_of_the_same_number_elsewhere_is_not_taken_for_the_instance(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    end = ProcessEnd(process.pid, str(tmp_path / "another.txt"))
    end.kill()
    assert not end.here and not end.over() and end.status() == (None, None)
    assert process.poll() is None
    mine = ProcessEnd(process.pid, str(tmp_path / "err.txt"))
    assert mine.here and not mine.over() and mine.status() == (None, None)
    mine.kill()
    assert process.wait() == -signal.SIGKILL
    mine.kill()  # does nothing
    mine.close()


def test_last_words_are_the_last_line_that_is_not_rays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(str(log)) == ""
    log.write_text(":job_id:01\n:actor_name:_Actor\n")
    assert last_words(str(log)) == ""
    log.write_text("x" * 10_000 + "\nValueError: no\n\n:task_name:call\n")
    assert last_words(str(log)) == "ValueError: no"


def test_an_instance_that_does_not_come_back_is_missed_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk under Ray's logs was full: Ray started it again every two seconds, and nobody said so."""
    monkeypatch.setattr(ray_cluster, "MISSED_S", 0.01)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 30, free=1 << 12))
    connection: Any = RayConnection("a", Actor(AWAY, AWAY, description("a"), AWAY, ActorDiedError()), str(tmp_path))
    said = lambda: [each for each in caplog.messages if "has not come back" in each]  # noqa: E731

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(Lost) as caught:
                await connection.call("describe")
            assert "had not begun to serve" in str(caught.value)
        await until(lambda: len(said()) == 3)
        assert "instance a" in said()[0] and str(tmp_path) in said()[0] and "4 KiB of the disk free" in said()[0]
        assert "make room" in said()[0]
        await connection.call("describe")
        assert connection._missed is None  # it is back
        with pytest.raises(Lost):
            await connection.call("poll")
        assert connection._missed is not None
        with pytest.raises(Lost):
            await connection.call("describe")
        assert connection._missed is None  # it is gone for good

    with caplog.at_level(logging.WARNING, "remap_serve.cluster"):
        asyncio.run(asyncio.wait_for(run(), 30.0))


def test_logs_of_workers_that_have_ended_do_not_pile_up(tmp_path: Path) -> None:
    """One that died at each start left three files every two seconds."""
    names = ["worker-ab-ffffffff-{}.err", "worker-ab-ffffffff-{}.out", "python-core-worker-ab_{}.log"]
    gone = [tmp_path / name.format((1 << 23) + number) for number in range(4) for name in names]
    others = [tmp_path / names[0].format(os.getpid()), tmp_path / "raylet.out"]
    for at_s, path in enumerate([*others, *gone]):
        path.touch()
        os.utime(path, (at_s, at_s))
    ray_sessions.trim(tmp_path, 6)
    assert {*tmp_path.iterdir()} == {*others, *gone[6:]}


def test_folders_of_former_servers_are_removed_and_no_others(tmp_path: Path) -> None:
    """Each server left one, and they filled the disk."""

    def session(name: str, at_s: int) -> tuple[Path, Any]:
        folder = tmp_path / f"session_{name}"
        (folder / "sockets").mkdir(parents=True)
        (folder / "log").write_text("text")
        file = ray_sessions.mark(folder)
        os.utime(folder / ray_sessions.MARK, (at_s, at_s))
        return folder, file

    over = []
    for number in range(6):
        folder, file = session(f"over{number}", number)
        file.close()
        over.append(folder)
    living, held = session("living", 0)
    answering, file = session("answering", 0)
    file.close()
    foreign = tmp_path / "session_foreign"
    foreign.mkdir()
    linked = tmp_path / "session_latest"
    linked.symlink_to(over[0])
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(answering / "sockets" / "raylet"))
        raylet.listen()
        assert set(ray_sessions.remove_old(tmp_path, 4)) == {over[0], over[1]}
    assert {path for path in tmp_path.iterdir() if path.exists()} == {*over[2:], living, answering, foreign}
    held.close()
    assert set(ray_sessions.remove_old(tmp_path, 0)) == {*over[2:], living, answering}

"""A broker in a process of its own, which can be killed: `python broker_serving.py SOCKET PAGES PAGE_BYTES DEVICE`. It ends when
its input does; told "die POINT PASSAGES", it kills itself when it has come to this point so many times more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from remap.broker.messages import Grant, Recall
from remap.broker.server import Broker
from remap.errors import Error


class Serving:
    """The other side of `main`. said: "ready", or why it does not serve."""

    def __init__(self, path: object, pages: int, page_bytes: int, device: str) -> None:
        command = [sys.executable, __file__, str(path), str(pages), str(page_bytes), device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def die(self, point: int, passages: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"die {point} {passages}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            self.process.kill()
            pipe.close()
        self.process.wait(timeout=60)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def main(path: str, pages: str, page_bytes: str, device: str) -> None:
    try:
        broker = Broker(path, int(pages) * int(page_bytes), int(page_bytes), device)
    except Error as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n".replace("\n", " ") + "\n")
        return
    with broker:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            _, point, passages = line.split()
            _die_at(broker, BROKER_POINTS[int(point)], int(passages))


BROKER_POINTS = ("recalled", "given", "granted")
"""Of a broker: a member is asked for pages; pages were given, and the one that gets them has not heard of it; it has."""


def _die_at(broker: Any, point: str, passages: int) -> None:
    owner, name, happens = {
        "recalled": (broker, "_send", lambda result, member, message: isinstance(message, Recall)),
        "given": (broker.ledger, "gave", lambda result, *given: _grants(message for _, message in result)),
        "granted": (broker, "_send", lambda result, member, message: _grants([message])),
    }[point]
    arm(owner, name, happens, True, passages)


def _grants(messages: Any) -> bool:
    return any(isinstance(message, Grant) and message.runs for message in messages)


def arm(owner: Any, name: str, happens: Callable[..., bool], behind: bool, passages: int) -> None:
    """The process kills itself at the call of that number of which `happens`(result, *arguments) says so; behind: when it is
    over, else before, and its result is None."""
    plain, left = getattr(owner, name), [passages]

    def call(*given: Any, **more: Any) -> Any:
        result = plain(*given, **more) if behind else None
        if happens(result, *given):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
        return result if behind else plain(*given, **more)

    setattr(owner, name, call)


if __name__ == "__main__":
    main(*sys.argv[1:])

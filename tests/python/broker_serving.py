"""A broker in a process of its own, which can be killed: `python broker_serving.py SOCKET PAGES PAGE_BYTES DEVICE`. It ends when
its input does."""

from __future__ import annotations

import subprocess
import sys

from remap.broker.server import Broker
from remap.errors import Error


class Serving:
    """The other side of `main`. said: "ready", or why it does not serve."""

    def __init__(self, path: object, pages: int, page_bytes: int, device: str) -> None:
        command = [sys.executable, __file__, str(path), str(pages), str(page_bytes), device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

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
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

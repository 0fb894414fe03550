"""An instance with the contract of production that computes nothing: `control_worlds.Double` in real time, in any process.

Instances hand requests over through files in a shared folder, and tell each other their epochs there. So it needs neither
torch nor a network, and runs in threads of a test as well as in Ray actors (`TinyInstance` is the factory).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from control_worlds import FINGERPRINT, MEMORY, Ask, Chaos, Double, Held, description

from remap import errors
from remap_serve.cluster.front import Lost
from remap_serve.cluster.ledger import Submission
from remap_serve.cluster.messages import (
    Abort,
    BringHome,
    ChangeRefused,
    Commit,
    Description,
    GiveUp,
    GroupPlan,
    InstanceReport,
    Part,
    Prepare,
    Recover,
    Tokens,
)
from remap_serve.cluster.service import Cancel, Submit

STEP_S = 0.01


class _Place:
    """What `Double` knows of the world around it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.chaos = Chaos()
        self.offers = ()
        self.poisons: dict[str, int] = {}
        self.refused: ChangeRefused | None = None
        self.bounced = False
        self.doubles = self
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._number = 0

    @property
    def now(self) -> float:
        return time.monotonic()

    def chance(self, share: float) -> bool:
        return False

    def delay(self) -> float:
        return 0.01

    def later(self, after_s: float, call: Callable[[], None]) -> None:
        self._due.append((self.now + after_s, call))

    def fire(self) -> None:
        now, due = self.now, self._due
        self._due = [each for each in due if each[0] > now]
        for at_s, call in due:
            if at_s <= now:
                call()

    def tell(self, event: object) -> None:
        if isinstance(event, ChangeRefused):
            self.refused = event

    def bounce(self, id: str, attempt: int) -> None:
        self.bounced = True

    def get(self, name: str) -> Any:
        """Another instance, as its file says."""
        try:
            epoch = int((self.folder / f"{name}.epoch").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return SimpleNamespace(alive=True, epoch=epoch)

    def publish(self, epoch: int) -> None:
        self._write(self.folder / f"{self.name}.epoch", str(epoch).encode())

    def hand_over(self, name: str, epoch: int, parts: tuple[Part, ...], held: list[Held]) -> None:
        self._number += 1
        self._write(self.folder / f"{name}.{epoch}.{self.name}.{self._number}.held", pickle.dumps((epoch, parts, held)))

    def come(self) -> list[tuple[int, tuple[Part, ...], list[Held]]]:
        found = []
        for path in sorted(self.folder.glob(f"{self.name}.*.held")):
            found.append(pickle.loads(path.read_bytes()))
            path.unlink()
        return found

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
        part.write_bytes(data)
        part.replace(path)


class TinyInstance:
    """The contract of an instance. A lock guards the double: calls and the loop take turns."""

    def __init__(self, name: str, folder: str, memory: int = MEMORY, config: str = "tiny") -> None:
        self._place = _Place(name, Path(folder))
        self._double = Double(name, self._place)
        self._description = replace(description(name, memory, replace(FINGERPRINT, config=config)), pid=os.getpid())
        self._news = threading.Condition()
        self._place.publish(0)
        threading.Thread(target=self._loop, daemon=True).start()

    def stop(self) -> None:
        """As if its process had ended."""
        with self._news:
            self._double.alive = False
            (self._place.folder / f"{self._double.name}.epoch").unlink(missing_ok=True)

    def _loop(self) -> None:
        while self._double.alive:
            with self._news:
                double, epoch = self._double, self._double.epoch
                self._place.fire()
                for handed in self._place.come():
                    double.take_over(*handed)
                double.step()
                if double.epoch != epoch:
                    self._place.publish(double.epoch)
                if double.out or double.epoch != epoch:
                    self._news.notify_all()
            time.sleep(STEP_S)

    def _command(self, command: object) -> None:
        with self._news:
            self._place.refused = None
            self._place.bounced = False
            self._double.command(command)
            self._place.publish(self._double.epoch)
            if self._place.bounced:
                raise errors.InvalidState("the request must go to a head; nothing changed; ask where it is")
            if self._place.refused is not None:
                kind = getattr(errors, self._place.refused.error, errors.InvalidState)
                raise kind(self._place.refused.reason)

    def describe(self) -> Description:
        return replace(self._description, epoch=self._double.epoch)

    def prepare(self, plan: GroupPlan) -> None:
        self._command(Prepare(self._double.name, plan))

    def commit(self, epoch: int) -> None:
        self._command(Commit(self._double.name, epoch))

    def abort(self, epoch: int) -> None:
        self._command(Abort(self._double.name, epoch))

    def fetch(self, epoch: int, copies: tuple[Any, ...]) -> None:
        self._command(BringHome(self._double.name, epoch, copies))

    def recover(self, epoch: int) -> None:
        self._command(Recover(self._double.name, epoch))

    def submit(self, request: Any, attempt: int, tokens: tuple[int, ...], epoch: int) -> None:
        if len(request.prompt) + request.sampling.max_tokens > 150:
            raise errors.InvalidArgument("the request must have 150 tokens at most; nothing was queued")
        ask = Ask(request.id, len(request.prompt), request.sampling.max_tokens)
        self._command(Submit(self._double.name, Submission(request.id, ask, attempt, tokens), epoch))

    def cancel(self, id: str, attempt: int) -> None:
        self._command(Cancel(self._double.name, id, attempt))

    def release(self, id: str) -> int | None:
        with self._news:
            stuck = self._double.stuck
            return self._double.requests.pop(id).attempt if stuck is not None and stuck[0] == id else None

    def give_up(self, id: str) -> None:
        self._command(GiveUp(self._double.name, id))

    def poll(self, timeout_s: float) -> tuple[list[Tokens], InstanceReport]:
        with self._news:
            self._news.wait_for(lambda: self._double.out, timeout_s)
            out, self._double.out = self._double.out, []
            return out, self._double.report()


class LocalConnection:
    """To an instance in this process; a killed one comes back at once, as another. slow: it does not come up."""

    def __init__(self, name: str, returns: bool = True, **arguments: Any) -> None:
        self.name = name
        self.returns = returns
        self.slow = False
        self.calls: list[str] = []
        self.arguments = arguments
        self.instance = self.make()
        self._lost = asyncio.Event()

    def make(self) -> Any:
        return TinyInstance(self.name, **self.arguments)

    def stop(self) -> None:
        self.instance.stop()

    async def call(self, method: str, *arguments: object) -> Any:
        while self.slow:
            await asyncio.sleep(STEP_S)
        instance, lost = self.instance, self._lost
        self.calls.append(method)
        work = asyncio.ensure_future(asyncio.to_thread(getattr(instance, method), *arguments))
        gone = asyncio.ensure_future(lost.wait())
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if lost.is_set():
            work.cancel()
            raise Lost("the instance is gone", instance=self.name, returns=self.returns)
        gone.cancel()
        return work.result()

    def kill(self) -> None:
        self.stop()
        self._lost.set()
        if self.returns:
            self._lost = asyncio.Event()
            self.instance = self.make()

"""The emulated CUDA driver (tests/emulated_driver): where it is, and its control calls.

It is one library a process, with one state: the settings below hold from `configure` to the next one, or to `reset`.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "libremap_emulated_cuda.so"
KINDS = ("reservations", "mappings", "pages", "streams", "events", "registrations", "contexts")

OUT_OF_MEMORY, LAUNCH_FAILED, NOT_PERMITTED = 2, 719, 800  # CUresult


def find() -> Path:
    """REMAP_EMULATED_DRIVER, else what `make test` has built. Raises FileNotFoundError that says how to build it."""
    path = Path(os.environ.get("REMAP_EMULATED_DRIVER") or ROOT / "build" / "cpp" / NAME)
    if not path.is_file():
        raise FileNotFoundError(
            f"the emulated driver is not at {path}: build it (`make cpp-tests`), or name it in REMAP_EMULATED_DRIVER"
        )
    return path


class Emulated:
    """The control calls (tests/emulated_driver/control.h) of the library at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = library = ctypes.CDLL(self.path)
        for name in ("Calls", "Violations", "Pageable", "Live"):
            getattr(library, f"remapEmulated{name}").restype = ctypes.c_uint64
        for name in ("Violation", "EntryPoint"):
            getattr(library, f"remapEmulated{name}").restype = ctypes.c_char_p

    def reset(self) -> None:
        """The environment's settings again. Forgets violations, counts and faults; heals failed streams and lost contexts.

        What is live stays, and the granularity with it.
        """
        self._library.remapEmulatedReset()

    def configure(self, **settings: int) -> None:
        """`reset`, then `change`."""
        self.reset()
        self.change(**settings)

    def change(self, **settings: int) -> None:
        """These settings, by their names in settings.h: granularity, memory, map_ns, driver_lock, jitter_us, ..."""
        for name, value in settings.items():
            status = self._library.remapEmulatedConfigure(name.encode(), ctypes.c_uint64(value))
            assert status == 0, f"{name} = {value} was refused ({status}) while there are {self.live()}"

    def arm(self, name: str, nth: int, code: int, *, forever: bool = False) -> None:
        """The nth call (1: the next) of this entry point returns `code` and does nothing.

        "run:" and the name of a copy or fill: it fails while it runs, half done.
        """
        self._library.remapEmulatedArm(name.encode(), ctypes.c_uint64(nth), code, int(forever))

    def disarm(self) -> None:
        self._library.remapEmulatedDisarm()

    def calls(self, name: str | None = None) -> int:
        """Calls of one entry point since `reset`, or of all."""
        return int(self._library.remapEmulatedCalls(None if name is None else name.encode()))

    def entry_points(self) -> tuple[str, ...]:
        names: list[str] = []
        while (name := self._library.remapEmulatedEntryPoint(ctypes.c_uint64(len(names)))) is not None:
            names.append(name.decode())
        return tuple(dict.fromkeys(names))

    def pageable(self) -> int:
        """Copies since `reset` whose host side was not page-locked."""
        return int(self._library.remapEmulatedPageable())

    def blocked(self) -> int:
        """Callers that wait in a call that enqueues, since their stream's channel is full."""
        return int(self._library.remapEmulatedLive(b"blocked"))

    def violations(self) -> list[str]:
        """Rules of the driver that were broken since `reset`."""
        count = int(self._library.remapEmulatedViolations())
        return [self._library.remapEmulatedViolation(ctypes.c_uint64(i)).decode() for i in range(count)]

    def live(self) -> dict[str, int]:
        """What was made and not given back, by kind; kinds of which there is nothing are left out."""
        counts = {kind: int(self._library.remapEmulatedLive(kind.encode())) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}

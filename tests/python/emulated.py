"""The emulated CUDA driver (tests/emulated_driver): where it is, and its control calls.

It is one library a process, with one state: the settings below hold from `configure` to the next one.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "libremap_emulated_cuda.so"
KINDS = ("reservations", "mappings", "pages", "streams", "events", "registrations", "contexts")


def find() -> Path:
    """REMAP_EMULATED_DRIVER, else what `make test` has built. Raises FileNotFoundError that says how to build it."""
    path = Path(os.environ.get("REMAP_EMULATED_DRIVER") or ROOT / "build" / "cpp" / NAME)
    if not path.is_file():
        raise FileNotFoundError(
            f"the emulated driver is not at {path}: build it (`make cpp-tests`), or name it in REMAP_EMULATED_DRIVER"
        )
    return path


class Emulated:
    """The control calls of the library at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = library = ctypes.CDLL(self.path)
        for name in ("Calls", "Violations", "Pageable", "Live"):
            getattr(library, f"remapEmulated{name}").restype = ctypes.c_uint64
        library.remapEmulatedViolation.restype = ctypes.c_char_p

    def configure(self, *, granularity: int, memory: int, driver_version: int = 13000) -> None:
        """Settings from here on; forgets violations, counts and faults. What is live stays."""
        os.environ["REMAP_EMULATED_GRANULARITY"] = str(granularity)
        os.environ["REMAP_EMULATED_MEMORY"] = str(memory)
        os.environ["REMAP_EMULATED_DRIVER_VERSION"] = str(driver_version)
        self._library.remapEmulatedReset()

    def arm(self, name: str, nth: int, code: int, *, forever: bool = False) -> None:
        """The nth call (1: the next) of this entry point returns `code` and does nothing."""
        self._library.remapEmulatedArm(name.encode(), ctypes.c_uint64(nth), code, int(forever))

    def disarm(self) -> None:
        self._library.remapEmulatedDisarm()

    def calls(self, name: str | None = None) -> int:
        """Calls of one entry point since `configure`, or of all."""
        return int(self._library.remapEmulatedCalls(None if name is None else name.encode()))

    def pageable(self) -> int:
        """Copies since `configure` whose host side was not page-locked."""
        return int(self._library.remapEmulatedPageable())

    def violations(self) -> list[str]:
        """Rules of the driver that were broken since `configure`."""
        count = int(self._library.remapEmulatedViolations())
        return [self._library.remapEmulatedViolation(ctypes.c_uint64(i)).decode() for i in range(count)]

    def live(self) -> dict[str, int]:
        """What was made and not given back, by kind; kinds of which there is nothing are left out."""
        counts = {kind: int(self._library.remapEmulatedLive(kind.encode())) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}
